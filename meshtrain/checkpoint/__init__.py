from meshtrain import lazy

lazy.load_modules_of(__name__)
