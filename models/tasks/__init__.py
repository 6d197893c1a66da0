"""What there is to learn: images, sentences, masked words, text to be continued."""
