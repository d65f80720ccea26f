"""Rules of generated text: when it ends, which tokens may come next, what is read from it."""
