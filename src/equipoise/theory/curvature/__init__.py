"""Curvature of transformer parts: closed forms of second derivatives, and bounds.

Each part φ with inputs z and a cotangent g at its output has the matrix ∇²⟨g, φ(z)⟩.
It is given twice: as a product with a tangent (``…_product``, no matrix is formed) and
as blocks of numbers (``…_hessian``), with its norm where that has a closed form.
"""
