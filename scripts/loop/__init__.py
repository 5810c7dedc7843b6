"""What every training script shares: settings, the loop, checkpoints, and how a run is launched and measured."""
