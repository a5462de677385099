"""Starts gcp-storage-emulator, with what it lacks of the protocol of Google Cloud Storage.

Usage: gcs_server.py PORT BUCKET. Downloads tell the generation of an object; writes and deletions
obey ifGenerationMatch; listings obey startOffset and endOffset.
"""

import sys
from http import HTTPStatus

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects


def generation(request, storage):
    name = request.params.get("object_id") or request.query["name"][0]
    try:
        return storage.get_file_obj(request.params["bucket_name"], name)["generation"]
    except NotFound:
        return "0"


def conditional(handle):
    def handled(request, response, storage, *args, **kwargs):
        expected = request.query.get("ifGenerationMatch", [None])[0]
        if expected is not None and expected != generation(request, storage):
            response.status = HTTPStatus.PRECONDITION_FAILED
            return
        handle(request, response, storage, *args, **kwargs)

    return handled


def with_generation(handle):
    def handled(request, response, storage, *args, **kwargs):
        response["x-goog-generation"] = found = generation(request, storage)
        if request.query.get("ifGenerationNotMatch", [None])[0] == found:
            response.status = HTTPStatus.NOT_MODIFIED
            return
        handle(request, response, storage, *args, **kwargs)

    return handled


def within_offsets(handle):
    def handled(request, response, storage, *args, **kwargs):
        first, end = (request.query.get(key, [""])[0] for key in ("startOffset", "endOffset"))
        write = response.json

        def within(answer):
            items = [
                one
                for one in answer.get("items") or ()
                if one["name"] >= first and (not end or one["name"] < end)
            ]
            write({**answer, "items": items})

        response.json = within
        handle(request, response, storage, *args, **kwargs)

    return handled


objects.insert = conditional(objects.insert)
objects.delete = conditional(objects.delete)
objects.download = with_generation(objects.download)
objects.get = with_generation(objects.get)
objects.ls = within_offsets(objects.ls)

if __name__ == "__main__":
    # After the changes: it makes a table of these functions.
    from gcp_storage_emulator.server import create_server

    create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2]).run()
