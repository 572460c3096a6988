"""One state, saved and brought back by everything that a user could take.

``state`` is the training that has it: a plain DeepSpeed script's. ``savers`` is what each way does
with it, as its own documentation has it, ``octavo`` the product's. ``rank`` is the program that
runs on each rank, under torchrun, and writes down what it measured.

Promises: all ways save the same state of the same steps; what is brought back is compared with it
bit for bit, in processes that have never seen it.
"""
