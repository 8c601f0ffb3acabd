//! Arrays by reference: the pools and leases of owners, handles, and the clients that fetch.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList, PyTuple};
use tokio::sync::SetOnce;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};
use tonic_rdma::{CallConfig, RdmaIncoming, RdmaServer};
use tonic_rdma_tensor::buffer::{self, LeaseOptions, ReaderSecret};
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorError, TensorSpec};

use crate::array::{Array, count_copied};
use crate::completions::Value;
use crate::connection::{self, Connection};
use crate::error::to_py;
use crate::memory::Elements;
use crate::runtime::{duration, runtime, wait};
use crate::server::{Server, with_port};
use crate::waits::{Made, Parents, Pending, closed};

/// The time that fetches have to end after the port of their pool is closed.
const GRACE: Duration = Duration::from_secs(1);

/// Memory that this process shares.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct BufferPool(Parents<Owner>);

/// The pool, and the port if it has its own.
#[derive(Debug)]
struct Owner {
    pool: buffer::BufferPool,
    uri: String,
    /// Bytes that `share` has copied.
    copied: AtomicU64,
    closed: CancellationToken,
    /// Set when the port is free; `None` if the pool is a server's.
    ended: Option<Arc<SetOnce<()>>>,
}

impl Owner {
    fn close(&self) {
        self.closed.cancel();
        self.pool.close();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.close();
    }
}

#[pymethods]
impl BufferPool {
    #[new]
    fn new(py: Python<'_>, address: Option<&str>, server: Option<&Server>, limit: u64) -> PyResult<Self> {
        let runtime = runtime()?;
        let _inside = runtime.enter();
        let make = |uri: &str| buffer::BufferPool::builder(uri).limit(limit).build().map_err(to_py);
        let closed = CancellationToken::new();
        if let Some(server) = server {
            let uri = server.uri(address)?;
            let pool = make(&uri)?;
            server.serve_buffers(pool.service())?;
            return Ok(Self(Parents::new(Owner {
                pool,
                uri,
                copied: AtomicU64::new(0),
                closed,
                ended: None,
            })));
        }
        let address = address.unwrap_or("127.0.0.1:0");
        // Before a port is taken: whether readers can connect to the address.
        make(&format!("http://{}", with_port(address, 1)))?;
        let incoming = wait(py, RdmaIncoming::bind(address))?.map_err(|error| refused(address, &error))?;
        let uri = format!("http://{}", with_port(address, incoming.local_addr().port()));
        let pool = make(&uri)?;
        let serving = RdmaServer::new()
            .calls(CallConfig::default().shutdown_grace(GRACE))
            .add_service(pool.service())
            .serve_with_incoming_shutdown(incoming, closed.clone().cancelled_owned());
        let ended = Arc::new(SetOnce::new());
        let end = Arc::clone(&ended);
        runtime.spawn(async move {
            // It fails if the process has no more descriptors. Readers then get PeerLost.
            let _ = serving.await;
            let _ = end.set(());
        });
        Ok(Self(Parents::new(Owner { pool, uri, copied: AtomicU64::new(0), closed, ended: Some(ended) })))
    }

    #[getter]
    fn uri(&self) -> &str {
        &self.0.uri
    }

    /// Shares an array: its bytes stay where they are if devices can read them there, and are copied otherwise.
    #[allow(clippy::too_many_arguments, reason = "they are the arguments of `share`")]
    fn share(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        readers: Option<u64>,
        time_limit: Option<f64>,
        writable: bool,
        checksum: bool,
        only_for: Option<Vec<String>>,
    ) -> PyResult<(RemoteBuffer, BufferLease)> {
        let _inside = runtime()?.enter();
        if self.0.closed.is_cancelled() {
            return Err(closed("pool"));
        }
        let mut options = LeaseOptions::new();
        if let Some(limit) = duration("time_limit", time_limit)? {
            options = options.time_limit(limit);
        }
        if let Some(readers) = readers {
            options = options.readers(readers);
        }
        if let Some(names) = only_for {
            options = options.only_for(names);
        }
        if writable {
            options = options.writable();
        }
        if checksum {
            options = options.checksum();
        }
        let elements = Elements::of(object)?;
        let (lease, handle) = py.detach(|| self.0.share(&elements, options))?;
        // Here, with the interpreter's lock.
        drop(elements);
        let lease = BufferLease(Parents::new(Arc::new(Lease(Some(lease)))));
        Ok((RemoteBuffer::of(handle)?, lease))
    }

    /// Admits a reader, and returns its secret.
    fn admit<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        runtime()?;
        let secret = self.0.pool.admit(name).map_err(to_py)?;
        Ok(PyBytes::new(py, &secret.to_bytes()))
    }

    fn dismiss(&self, name: &str) -> PyResult<()> {
        runtime()?;
        self.0.pool.dismiss(name);
        Ok(())
    }

    /// Returns leases, their bytes, and the bytes that `share` has copied.
    fn statistics(&self) -> PyResult<(u64, u64, u64)> {
        runtime()?;
        let found = self.0.pool.statistics();
        Ok((found.leases, found.bytes, self.0.copied.load(Ordering::Relaxed)))
    }

    /// Ends all leases, and waits until the port is free.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        runtime()?;
        self.0.close();
        match self.0.ended.clone() {
            Some(ended) => wait(py, async move { *ended.wait().await }),
            None => Ok(()),
        }
    }
}

impl Owner {
    /// Shares elements, which are copied once if devices can't read them where they lie.
    fn share(
        &self,
        elements: &Elements,
        options: LeaseOptions,
    ) -> PyResult<(buffer::BufferLease, buffer::RemoteBuffer)> {
        let (spec, bytes) = (elements.spec(), elements.length());
        let content = match elements.registered()? {
            Some(tensor) => tensor.to_bytes().map_err(to_py)?,
            None if bytes == 0 => Bytes::new(),
            None => {
                let mut copy = self.pool.allocate(bytes).map_err(to_py)?;
                elements.copy_to(&mut copy);
                self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
                count_copied(bytes);
                copy.freeze()
            }
        };
        let (lease, mut handle) = self.pool.share_with(content, options).map_err(to_py)?;
        handle.dtype = spec.dtype().name().into();
        handle.shape = spec.shape().dims().to_vec();
        Ok((lease, handle))
    }
}

/// The error of an address that can't be listened on.
fn refused(address: &str, error: &std::io::Error) -> PyErr {
    let text = format!("the pool can't listen on {address}: {error}");
    match error.kind() {
        std::io::ErrorKind::InvalidInput => PyValueError::new_err(text),
        kind => std::io::Error::new(kind, text).into(),
    }
}

/// A lease, which its owner holds, and what waits for it. One that is dropped ends, or does so by its time
/// limit or count of readers if it has one.
#[derive(Debug)]
struct Lease(Option<buffer::BufferLease>);

impl Deref for Lease {
    type Target = buffer::BufferLease;

    fn deref(&self) -> &buffer::BufferLease {
        let Some(lease) = &self.0 else { unreachable!("it is taken when it is dropped") };
        lease
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // One that has no limit comes back, and ends as it is dropped.
        drop(self.0.take().map(buffer::BufferLease::detach));
    }
}

/// The owner's side of a handle.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct BufferLease(Parents<Arc<Lease>>);

/// Name, address, fetches that run, fetches that are complete, bytes.
type Reader = (Option<String>, Option<String>, u64, u64, u64);

#[pymethods]
impl BufferLease {
    fn revoke(&self) -> PyResult<()> {
        runtime()?;
        self.0.revoke();
        Ok(())
    }

    fn close(&self) -> PyResult<()> {
        runtime()?;
        self.0.close();
        Ok(())
    }

    fn readers(&self) -> PyResult<Vec<Reader>> {
        runtime()?;
        let name = |name: &Arc<str>| (**name).to_owned();
        let readers = self.0.readers().into_iter();
        let entry = |reader: buffer::ReaderStatus| {
            let address = reader.address.map(connection::peer);
            (reader.name.as_ref().map(name), address, reader.running, reader.complete, reader.bytes)
        };
        Ok(readers.map(entry).collect())
    }

    fn writes(&self) -> PyResult<u64> {
        runtime()?;
        Ok(self.0.writes())
    }

    /// Waits until the lease has ended and nothing fetches.
    fn ended(&self, timeout: Option<f64>) -> PyResult<Pending> {
        let lease = Arc::clone(&self.0);
        Pending::new(timeout, "the end of the lease", async move {
            lease.ended().await;
            Ok(())
        })
    }

    /// Waits for more than `known` writes. Gives their number.
    fn written(&self, known: u64, timeout: Option<f64>) -> PyResult<Pending> {
        let lease = Arc::clone(&self.0);
        Pending::new(timeout, "a write", async move { lease.written(known).await.map(Count).map_err(to_py) })
    }
}

#[derive(Debug)]
struct Count(u64);

impl Value for Count {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.0.into_pyobject(py)?.into_any().unbind())
    }
}

/// A handle.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct RemoteBuffer {
    handle: Arc<buffer::RemoteBuffer>,
    /// Of the array; bytes if the handle names none.
    spec: TensorSpec,
}

impl RemoteBuffer {
    fn of(handle: buffer::RemoteBuffer) -> PyResult<Self> {
        let spec = match handle.spec().map_err(to_py)? {
            Some(spec) => spec,
            None => bytes_of(handle.length).map_err(to_py)?,
        };
        Ok(Self { handle: Arc::new(handle), spec })
    }
}

/// The spec of an array of bytes.
fn bytes_of(length: u64) -> Result<TensorSpec, TensorError> {
    TensorSpec::new(Dtype::U8, Shape::new(&[length])?)
}

#[pymethods]
impl RemoteBuffer {
    #[new]
    fn new(data: &[u8]) -> PyResult<Self> {
        let wrong = |error: &str| {
            PyValueError::new_err(format!("a RemoteBuffer can't be read from these bytes: {error}"))
        };
        let handle = buffer::RemoteBuffer::decode(data).map_err(|error| wrong(&error.to_string()))?;
        match handle.owner.is_empty() {
            true => Err(wrong("it names no owner; perhaps the field was not set")),
            false => Self::of(handle),
        }
    }

    fn data<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.handle.encode_to_vec())
    }

    #[getter]
    fn owner(&self) -> &str {
        &self.handle.owner
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.handle.length
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.spec.dtype().name()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.spec.shape().dims())
    }
}

/// A reader.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct BufferClient(Parents<Arc<buffer::BufferClient>>);

/// URI, connection, bytes that landed, and those of them that were copied.
type ConnectedOwner = (String, Option<Connection>, u64, u64);

/// PEM: roots, key, chain.
type Tls = (PyBackedBytes, Option<PyBackedBytes>, Option<PyBackedBytes>);

#[pymethods]
impl BufferClient {
    #[new]
    fn new(
        timeout: f64,
        max_fetch_bytes: u64,
        landing_budget: u64,
        secrets: Vec<(String, String, PyBackedBytes)>,
        tls: Option<Tls>,
        calls_itself: bool,
    ) -> PyResult<Self> {
        let _inside = runtime()?.enter();
        let mut builder = buffer::BufferClient::builder()
            .timeout(duration("timeout", Some(timeout))?.unwrap_or(Duration::MAX))
            .max_fetch_bytes(max_fetch_bytes)
            .landing_budget(landing_budget);
        for (owner, name, secret) in secrets {
            builder = builder.secret(ReaderSecret::new(&owner, &name, &secret).map_err(to_py)?);
        }
        if let Some((roots, key, chain)) = tls {
            let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(roots));
            if let (Some(key), Some(chain)) = (key, chain) {
                config = config.identity(Identity::from_pem(chain, key));
            }
            builder = builder.client_tls(config);
        }
        if calls_itself {
            builder = builder.calls_itself();
        }
        Ok(Self(Parents::new(Arc::new(builder.build()))))
    }

    /// Fetches all bytes, as an array.
    fn fetch(&self, buffer: &RemoteBuffer, timeout: Option<f64>) -> PyResult<Pending> {
        let (client, handle, spec) = (Arc::clone(&self.0), Arc::clone(&buffer.handle), buffer.spec);
        Pending::new(timeout, "the fetch", async move {
            let bytes = client.fetch(&handle).await.map_err(to_py)?;
            array_of(spec, bytes).map(Made)
        })
    }

    /// Fetches as many bytes as `object` has, from `offset` on.
    fn fetch_into(
        &self,
        buffer: &RemoteBuffer,
        object: &Bound<'_, PyAny>,
        offset: u64,
        timeout: Option<f64>,
    ) -> PyResult<Pending> {
        let mut elements = Elements::of(object)?;
        same_elements(buffer, elements.spec())?;
        let length = elements.writable()?.len() as u64;
        let range = offset..offset.saturating_add(length);
        if range.end > buffer.handle.length {
            let reason =
                format!("{length} bytes at offset {offset} of a buffer of {} bytes", buffer.handle.length);
            return Err(PyValueError::new_err(reason));
        }
        let (client, handle) = (Arc::clone(&self.0), Arc::clone(&buffer.handle));
        Pending::new(timeout, "the fetch", async move {
            let fetched = match elements.writable() {
                Ok(destination) => client.fetch_into(&handle, destination, range).await.map_err(to_py),
                Err(error) => Err(error),
            };
            Ok(Given { elements, result: fetched })
        })
    }

    /// Fetches ranges of bytes, each as an array.
    fn fetch_blocks(
        &self,
        buffer: &RemoteBuffer,
        ranges: Vec<(u64, u64)>,
        timeout: Option<f64>,
    ) -> PyResult<Pending> {
        let (client, handle) = (Arc::clone(&self.0), Arc::clone(&buffer.handle));
        let ranges: Vec<_> = ranges.into_iter().map(|(start, end)| start..end).collect();
        Pending::new(timeout, "the fetch", async move {
            let blocks = client.fetch_blocks(&handle, &ranges).await.map_err(to_py)?;
            let array = |block: Bytes| array_of(bytes_of(block.len() as u64).map_err(to_py)?, block);
            Ok(Arrays(blocks.into_iter().map(array).collect()))
        })
    }

    /// Fetches all bytes of many buffers. Gives an array or an exception for each.
    fn fetch_all(&self, buffers: Vec<PyRef<'_, RemoteBuffer>>, timeout: Option<f64>) -> PyResult<Pending> {
        let client = Arc::clone(&self.0);
        let handles: Vec<_> = buffers.iter().map(|buffer| (*buffer.handle).clone()).collect();
        let specs: Vec<_> = buffers.iter().map(|buffer| buffer.spec).collect();
        Pending::new(timeout, "the fetch", async move {
            let fetched = client.fetch_all(&handles).await.into_iter().zip(specs);
            let arrays = fetched.map(|(bytes, spec)| array_of(spec, bytes.map_err(to_py)?));
            Ok(Arrays(arrays.collect()))
        })
    }

    /// Writes an array into the owner's buffer, from `offset` on.
    fn write_back(
        &self,
        buffer: &RemoteBuffer,
        offset: u64,
        object: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Pending> {
        let tensor = Elements::of(object)?.into_tensor(object.py())?;
        same_elements(buffer, tensor.spec())?;
        let (client, handle) = (Arc::clone(&self.0), Arc::clone(&buffer.handle));
        Pending::new(timeout, "the write", async move {
            let written = async {
                let bytes = match tensor.is_contiguous() {
                    true => tensor.to_bytes()?,
                    false => {
                        let copy = tensor.to_contiguous()?.to_bytes()?;
                        count_copied(copy.len());
                        copy
                    }
                };
                client.write_back(&handle, offset, bytes).await
            };
            let written = written.await.map_err(to_py);
            Ok(Given { elements: tensor, result: written })
        })
    }

    /// Returns the owners that the client is connected to.
    fn owners(&self) -> PyResult<Vec<ConnectedOwner>> {
        runtime()?;
        let owners = self.0.owners().into_iter();
        let entry = |status: buffer::OwnerStatus| {
            let counters = status.connection.as_ref().map(|info| info.counters()).unwrap_or_default();
            let copied = counters.landed_copied_bytes + counters.landed_moved_bytes;
            let connection = status.connection.as_ref().map(|info| Connection::new(info, info.is_tls()));
            ((*status.owner).to_owned(), connection, counters.landed_bytes, copied)
        };
        Ok(owners.map(entry).collect())
    }
}

/// Returns the array of fetched bytes, which are copied only if they are not aligned.
fn array_of(spec: TensorSpec, bytes: Bytes) -> PyResult<Array> {
    let tensor = if bytes.as_ptr().addr().is_multiple_of(spec.dtype().align()) {
        Tensor::from_bytes(spec, bytes)
    } else {
        count_copied(bytes.len());
        Tensor::copy_from(spec, &bytes)
    };
    Array::of_tensor(&tensor.map_err(to_py)?)
}

/// Refuses an array whose elements are not those of a buffer. Bytes fit each buffer.
fn same_elements(buffer: &RemoteBuffer, spec: &TensorSpec) -> PyResult<()> {
    let (of_buffer, dtype) = (buffer.spec.dtype(), spec.dtype());
    match dtype == of_buffer || [dtype, of_buffer].contains(&Dtype::U8) {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!(
            "the array has elements of {}, and the buffer of {}: view the array as uint8 to move bytes",
            dtype.name(),
            of_buffer.name()
        ))),
    }
}

/// The end of an operation on memory of Python, which is released before Python knows of the end.
#[derive(Debug)]
struct Given<E> {
    elements: E,
    result: PyResult<()>,
}

impl<E: std::fmt::Debug + Send> Value for Given<E> {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let Self { elements, result } = *self;
        drop(elements);
        result.map(|()| py.None())
    }
}

/// Fetched arrays.
#[derive(Debug)]
struct Arrays(Vec<PyResult<Array>>);

impl Value for Arrays {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let arrays: PyResult<Vec<_>> =
            self.0.into_iter().map(|array| Box::new(array.map(Made)).into_python(py)).collect();
        Ok(PyList::new(py, arrays?)?.into_any().unbind())
    }
}
