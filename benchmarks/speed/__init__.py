"""How fast layers, training steps and answers are, against dense ones in turns."""
