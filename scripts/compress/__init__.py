"""Parts of compress_pretrained.py: settings, texts, healing and report."""
