"""Who holds which bytes of parameters and gradients, and when."""
