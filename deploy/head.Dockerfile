# The head, without torch. The build context is wheels/head, which deploy/build.sh fills from
# deploy/head.requirements.txt; the rest is as in shard.Dockerfile, see there.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
COPY deps /wheels
RUN python -m venv --without-pip /opt/meshnet \
    && pip --python /opt/meshnet/bin/python install --quiet --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --key UID_MAX=20000 --no-create-home --home-dir /tmp --shell /bin/false meshnet
COPY --from=build /opt/meshnet /opt/meshnet
COPY own /opt/wheel
RUN pip --python /opt/meshnet/bin/python install --quiet --no-cache-dir --no-index --no-deps /opt/wheel/*.whl
ENV PATH=/opt/meshnet/bin:$PATH \
    HF_HOME=/tmp/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=4s --start-period=120s --retries=3 CMD ["python", "-ISc", \
    "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=3); c.request('GET', '/readyz'); raise SystemExit(c.getresponse().status != 200)"]
CMD ["meshnet", "head", "--host", "0.0.0.0", "--port", "8000"]
