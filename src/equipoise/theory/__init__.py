"""The papers' mathematics: bounds and closed forms for claims, audits and the lab.

``lipschitz`` bounds how much a layer amplifies a change of its input, ``curvature`` how
much it bends; ``softmax_norms`` and ``activations`` serve both. Preset ``default`` of
``watch`` imports none of it.
"""
