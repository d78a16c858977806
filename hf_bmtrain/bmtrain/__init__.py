"""The public interface under BMTrain's names, and `init_distributed`, which creates the world."""
