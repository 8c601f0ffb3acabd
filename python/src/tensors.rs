//! Devices, and channels to devices of other processes: tensors without a call for each.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio_util::sync::CancellationToken;
use tonic_rdma_tensor as tensor;
use tonic_rdma_tensor::{NamedOffer, NamedReply, RdmaDevice, Rights};

use crate::array::{Array, in_registered_memory, spec};
use crate::completions::Value;
use crate::error::to_py;
use crate::memory::Elements;
use crate::regions::{DeviceRegion, Direction, ExportedRegion, RegionCopy, RemoteRegion};
use crate::runtime::{duration, runtime, wait};
use crate::slots::{DynamicReceiver, DynamicSender, Received, StaticReceiver, StaticSender, strings_in};
use crate::waits::{Closable, Life, Made, Pending};

/// A device, until it is closed. What was made by it keeps it.
struct Opened {
    device: Closable<RdmaDevice>,
    closed: CancellationToken,
}

const DEVICE: &str = "device";
const CHANNEL: &str = "channel";

/// Begins the life of something that keeps the device.
fn life(opened: &Arc<Opened>) -> Life {
    Life::new(Arc::clone(opened) as _, &opened.closed)
}

/// Returns an argument as a number of its type.
///
/// # Errors
/// ValueError: it is out of range.
fn number<T: TryFrom<i128>>(name: &str, value: i128) -> PyResult<T> {
    T::try_from(value).map_err(|_| PyValueError::new_err(format!("{name}: {value} is out of range")))
}

/// This process, as its peers see it.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct Device {
    opened: Arc<Opened>,
    #[pyo3(get)]
    endpoint: String,
}

#[pymethods]
impl Device {
    #[new]
    #[pyo3(signature = (address, *, queue_pairs, answer_timeout, named_tensor_timeout, max_tensor_bytes, checksums))]
    fn new(
        py: Python<'_>,
        address: String,
        queue_pairs: Option<i128>,
        answer_timeout: f64,
        named_tensor_timeout: f64,
        max_tensor_bytes: i128,
        checksums: bool,
    ) -> PyResult<Self> {
        let limit = |name: &str, seconds: f64| {
            let limit = duration(name, Some(seconds))?.filter(|limit| *limit <= Duration::from_secs(1 << 30));
            limit.ok_or_else(|| PyValueError::new_err(format!("{name}: takes less than 2**30 seconds")))
        };
        let mut builder = RdmaDevice::builder()
            .answer_timeout(limit("answer_timeout", answer_timeout)?)
            .named_tensor_timeout(limit("named_tensor_timeout", named_tensor_timeout)?)
            .max_tensor_bytes(number("max_tensor_bytes", max_tensor_bytes)?)
            .checksums(checksums);
        if let Some(queue_pairs) = queue_pairs {
            builder = builder.queue_pairs_per_peer(number("queue_pairs", queue_pairs)?);
        }
        let device = wait(py, builder.bind(address))?.map_err(to_py)?;
        let endpoint = device.endpoint();
        let opened = Opened { device: Closable::new(DEVICE, device), closed: CancellationToken::new() };
        Ok(Self { opened: Arc::new(opened), endpoint })
    }

    fn empty(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Array> {
        let (device, spec) = (self.opened.device.open()?, spec(shape, dtype)?);
        let bytes = usize::try_from(spec.bytes().unwrap_or(0)).unwrap_or(usize::MAX);
        let region = DeviceRegion::new(py.detach(|| device.allocate(bytes)).map_err(to_py)?);
        Array::of_mapping(spec, region.mapping().clone(), region)
    }

    fn static_receiver(
        &self,
        name: &str,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        depth: i128,
    ) -> PyResult<StaticReceiver> {
        let (spec, depth) = (spec(shape, dtype)?, number("depth", depth)?);
        let slot = self.opened.device.open()?.static_receiver(name, &spec, depth).map_err(to_py)?;
        Ok(StaticReceiver::new(slot, life(&self.opened)))
    }

    fn dynamic_receiver(&self, name: &str, depth: i128) -> PyResult<DynamicReceiver> {
        let slot =
            self.opened.device.open()?.dynamic_receiver(name, number("depth", depth)?).map_err(to_py)?;
        Ok(DynamicReceiver::new(slot, life(&self.opened)))
    }

    fn export(
        &self,
        name: &str,
        array: &Bound<'_, PyAny>,
        read: bool,
        write: bool,
    ) -> PyResult<ExportedRegion> {
        let device = self.opened.device.open()?;
        ExportedRegion::new(&device, life(&self.opened), name, array, Rights { read, write })
    }

    /// Offers a tensor by its name; None for a dead one. Whatever devices can't read from where it lies is copied
    /// now, once for all readers.
    fn put(
        &self,
        py: Python<'_>,
        name: &str,
        step: i128,
        array: Option<&Bound<'_, PyAny>>,
        readers: i128,
    ) -> PyResult<()> {
        let (device, step, readers) =
            (self.opened.device.open()?, number("step", step)?, number("readers", readers)?);
        let offer = match array {
            Some(array) => NamedOffer::Tensor(match strings_in(array)? {
                Some(strings) => strings,
                None => in_registered_memory(py, &Elements::of(array)?)?,
            }),
            None => NamedOffer::Dead,
        };
        py.detach(|| device.put(name, step, offer, readers)).map_err(to_py)
    }

    fn withdraw(&self, name: &str, step: i128) -> PyResult<Option<u32>> {
        Ok(self.opened.device.open()?.withdraw(name, number("step", step)?))
    }

    /// Returns the number of offers, of their bytes, and of the requests that wait for an offer.
    fn offers(&self) -> PyResult<(usize, u64, usize)> {
        let counts = self.opened.device.open()?.offer_counts();
        Ok((counts.offers, counts.bytes, counts.requests))
    }

    fn channel(&self, endpoint: String, queue_pair: i128, timeout: Option<f64>) -> PyResult<Pending> {
        let (device, opened) = (self.opened.device.open()?, Arc::clone(&self.opened));
        let queue_pair = number("queue_pair", queue_pair)?;
        let made = async move {
            let channel = device.channel(&endpoint, queue_pair).await.map_err(to_py)?;
            let life = life(&opened);
            Ok(Made(TensorChannel { channel: Closable::new(CHANNEL, Arc::new(channel)), opened, life }))
        };
        Pending::new(timeout, "a link to the peer", life(&self.opened).limit(DEVICE, made))
    }

    fn close(&self) {
        if runtime().is_ok() {
            self.opened.closed.cancel();
            self.opened.device.close();
        }
    }
}

/// A channel to the device of a peer.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct TensorChannel {
    channel: Closable<Arc<tensor::Channel>>,
    opened: Arc<Opened>,
    life: Life,
}

impl TensorChannel {
    fn pending<V: Value + 'static>(
        &self,
        timeout: Option<f64>,
        what: &'static str,
        operation: impl Future<Output = PyResult<V>> + Send + 'static,
    ) -> PyResult<Pending> {
        Pending::new(timeout, what, self.life.limit(CHANNEL, operation))
    }

    fn copy(
        &self,
        region: &RemoteRegion,
        array: &Bound<'_, PyAny>,
        offset: i128,
        blocks: Option<&Bound<'_, PyAny>>,
        direction: Direction,
        timeout: Option<f64>,
    ) -> PyResult<Pending> {
        let through = (self.channel.open()?, self.opened.device.open()?);
        let copy = RegionCopy::new(through, region, array, number("offset", offset)?, blocks, direction)?;
        let what = if direction == Direction::Read { "the end of a read" } else { "the end of a write" };
        self.pending(timeout, what, copy.run())
    }
}

const ATTACHED: &str = "the answer of the peer";

#[pymethods]
impl TensorChannel {
    #[getter]
    fn endpoint(&self) -> PyResult<String> {
        Ok(self.channel.open()?.endpoint().to_owned())
    }

    /// Returns the name of the RDMA device.
    #[getter]
    fn device(&self) -> PyResult<String> {
        Ok(self.channel.open()?.device().1.to_owned())
    }

    #[getter]
    fn is_open(&self) -> bool {
        self.channel.open().is_ok_and(|channel| channel.is_open())
    }

    fn static_sender(
        &self,
        name: String,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Pending> {
        let (channel, spec, life) = (self.channel.open()?, spec(shape, dtype)?, self.life.part());
        self.pending(timeout, ATTACHED, async move {
            let slot = channel.static_sender(&name, &spec).await.map_err(to_py)?;
            Ok(Made(StaticSender::new(slot, life)))
        })
    }

    fn dynamic_sender(&self, name: String, timeout: Option<f64>) -> PyResult<Pending> {
        let (channel, life) = (self.channel.open()?, self.life.part());
        self.pending(timeout, ATTACHED, async move {
            let slot = channel.dynamic_sender(&name).await.map_err(to_py)?;
            Ok(Made(DynamicSender::new(slot, life)))
        })
    }

    /// The operation's value is the tensor; None if it is dead.
    fn request(&self, name: String, step: i128, timeout: Option<f64>) -> PyResult<Pending> {
        let (channel, step) = (self.channel.open()?, number("step", step)?);
        self.pending(timeout, "the tensor of a request", async move {
            match channel.request(&name, step).await.map_err(to_py)? {
                NamedReply::Tensor(tensor) => Ok(Some(Received(tensor))),
                NamedReply::Dead => Ok(None),
            }
        })
    }

    fn region(&self, name: String, timeout: Option<f64>) -> PyResult<Pending> {
        let channel = self.channel.open()?;
        self.pending(timeout, ATTACHED, async move {
            Ok(Made(RemoteRegion::new(channel.region(&name).await.map_err(to_py)?)))
        })
    }

    fn write(
        &self,
        region: &RemoteRegion,
        array: &Bound<'_, PyAny>,
        offset: i128,
        blocks: Option<&Bound<'_, PyAny>>,
        notify: bool,
        timeout: Option<f64>,
    ) -> PyResult<Pending> {
        self.copy(region, array, offset, blocks, Direction::Write { notify }, timeout)
    }

    fn read(
        &self,
        region: &RemoteRegion,
        array: &Bound<'_, PyAny>,
        offset: i128,
        blocks: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Pending> {
        self.copy(region, array, offset, blocks, Direction::Read, timeout)
    }

    /// Ends the operations under way.
    fn close(&self) {
        self.life.end();
        self.channel.close();
    }
}
