"""How each source built its job."""
