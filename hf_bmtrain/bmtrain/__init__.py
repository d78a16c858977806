"""BMTrain's public interface, and `init_distributed`, which creates the world."""
