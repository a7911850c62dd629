"""Training: tasks, and the loop that trains them."""
