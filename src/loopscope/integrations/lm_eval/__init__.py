"""How does any lm_eval task run on a looped model? As an lm_eval model, at a fixed depth or under an exit policy."""
