"""Where weights wait: the checkpoint's index, its readers, the packer, and host memory."""
