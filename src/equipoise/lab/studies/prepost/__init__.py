"""Emadi's experiment at our scale: pre-LN, post-LN and DeepNorm."""
