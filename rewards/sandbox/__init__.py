"""Running model-written Python: ``run`` starts and ends the processes, the other modules live inside them."""
