"""The training actor: forwards, advantages, loss, optimizer, weights and checkpoints of one rank."""
