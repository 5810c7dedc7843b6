"""In and out: building compressed models, load-time integration with Transformers, checkpoints, cards, pushing."""
