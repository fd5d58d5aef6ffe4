"""TLT ("Taming the Long Tail", arXiv 2511.16665) in JAX."""
