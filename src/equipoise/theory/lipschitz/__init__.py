"""Lipschitz bounds: how much a layer can amplify a change of its input.

``bound`` says what a bound claims; ``heads`` holds the weights of attention and
``forward`` its values at one input. ``published`` has the bounds of other authors,
``local`` ours of one head at a time, ``joint`` ours of all heads together up to the
local constant itself, ``layers`` feed-forward nets, norms and residual layers.
"""
