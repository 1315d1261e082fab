"""Mathematics of the papers that no reading of the instrument needs."""
