"""What every training script shares: settings, checkpoints, and how a run is launched, interrupted and measured."""
