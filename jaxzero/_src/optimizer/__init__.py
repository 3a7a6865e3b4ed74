"""The wrapped optimizer: traced whole, evaluated on shares."""
