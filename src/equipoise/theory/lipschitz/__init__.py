"""How much a layer can amplify a change of its input: published bounds, and ours.

One file per idea: what a bound claims (``bound``); what attention is (``heads``,
``rotary``, ``headnorm``) and what it does to one input (``forward``, ``attended``); the
published bounds by author (``emadi``, ``kim``, ``castin``, ``yudin``); ours from loose
to exact (``local``, ``joint``, ``blocks``, ``dual``); feed-forward nets and whole
layers (``feedforward``, ``layers``).
"""
