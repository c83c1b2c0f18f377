"""P/D pairs of SGLang: queues of prefill and decode engines, and the rooms between them."""
