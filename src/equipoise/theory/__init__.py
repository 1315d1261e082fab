"""The papers' mathematics: bounds and closed forms for claims, audits and the lab."""
