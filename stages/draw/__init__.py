"""The pictures: one module for each stage whose results it draws. Nothing else imports matplotlib."""
