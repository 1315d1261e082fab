"""QK-norm: the normalisation of queries or keys inside one head, and its transpose.

Axes, in this file:  E head width · x any leading axes.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """n(u) = γ ⊙ u / r(u), with r² = mean(u²) + ε: RMSNorm, or LayerNorm if centred.

    Normalising to unit length is RMSNorm with γ = 1/√E. A norm over all heads at once
    (OLMo 2) mixes heads and is another function: do not describe it with this one.
    """

    gain_E: Tensor | None = None
    eps: float = 0.0
    centred: bool = False

    def normalised(self, u_xE: Float[Tensor, "*x E"]) -> Tensor:
        u_xE = self._centre(u_xE)
        return self._gained(u_xE / self._radius(u_xE))

    def pulled(self, g_xE: Tensor, raw_xE: Tensor) -> Tensor:
        """Return Jᵀg for the Jacobian at the raw vector u, both broadcast:

        Jᵀg = C (γ⊙g − u (u·(γ⊙g)) / (E r²)) / r,      C the centring (or the identity).
        """
        raw_xE = self._centre(raw_xE)
        r_x1, g_xE = self._radius(raw_xE), self._gained(g_xE)
        along_x1 = (raw_xE * g_xE).mean(-1, keepdim=True) / r_x1.square()
        return self._centre((g_xE - raw_xE * along_x1) / r_x1)

    def _centre(self, u_xE: Tensor) -> Tensor:
        return u_xE - u_xE.mean(-1, keepdim=True) if self.centred else u_xE

    def _radius(self, u_xE: Tensor) -> Tensor:
        return (u_xE.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def _gained(self, u_xE: Tensor) -> Tensor:
        return u_xE if self.gain_E is None else u_xE * self.gain_E.to(u_xE)
