"""Storms: an open benchmark of training instability, labelled by the loss alone."""
