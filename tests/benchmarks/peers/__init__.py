"""What a user could take instead of Octavo, each set up as its own documentation says.

``environments`` installs what a peer needs apart from Octavo's own environment, ``sides`` says
how each is started, ``runs`` starts one, kills a rank in it if asked, and ends all that it left
behind, ``recorded`` is how every side writes down its steps, and ``judging`` what those come to.
``torchrun_train``, ``ray_train_driver`` and ``torchft_train`` are the programs that a peer's
user would write.

Promises: all sides train one model on one data set from one seed, and record the end of a step
in the same place of the same program; a run that hangs, fails or can't be started is a row with
the reason.
"""
