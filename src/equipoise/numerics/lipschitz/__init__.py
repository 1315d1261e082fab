"""How much a layer can amplify a change of its input: published bounds, and ours.

One file per idea: what a bound is (``bound``), what attention is (``heads``,
``rotary``, ``headnorm``, ``attended``), the published bounds by author (``emadi``,
``kim``, ``castin``, ``yudin``), ours from loose to tight (``local``, ``joint``,
``blocks``), then feed-forward nets (``feedforward``) and whole layers (``layers``).
"""
