"""What a checkpoint's weights say by themselves: no data, no forward pass."""
