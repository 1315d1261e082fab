"""Does the loss difference know of curvature, and does it say how much data to add?"""
