"""Model families: how each reads prompts and images, lays samples out, and measures log-probs."""
