"""The functions and classes of BMTrain's public interface, such as `init_distributed`, which connects the ranks."""
