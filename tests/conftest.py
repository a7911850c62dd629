import os
import signal

import torch
from hypothesis import settings

# The suite runs on machines with few cores, some of them busy: no deadlines, the same examples every time.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=int(os.environ.get("ZENDAYA_EXAMPLES", "60")))
settings.load_profile("suite")
torch.set_num_threads(1)  # one a worker: threads that wait for each other on a busy machine are slower than one
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs: programs the tests interrupt would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
