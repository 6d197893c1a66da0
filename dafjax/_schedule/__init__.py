"""The two passes of a plan: what runs when, and what is packed and unpacked for it."""
