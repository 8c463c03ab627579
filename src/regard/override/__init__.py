"""regard in place of torch's own attention, in programs that do not know regard.

```
switch.py     regard.everywhere: on and off, for the process
attention.py  what torch's dispatcher calls for scaled_dot_product_attention: regard, or torch with a reason
small_calls.py  torch.nn.functional.scaled_dot_product_attention: small calls at once to torch's kernel
decide.py     the reasons for which a call is passed on to torch
mask_content.py  what an attn_mask hides, read from its elements, so that hidden tiles are skipped
encoder.py    torch's fused encoder layer and multi-head attention, opened up so that their attention is found
report.py     what was caught, what was faster, what was passed on and why
```
"""
