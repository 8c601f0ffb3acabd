//! Slots: static ones for tensors of one shape, dynamic ones for tensors of any.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use tonic_rdma_tensor as tensor;
use tonic_rdma_tensor::unstable::send_to_end;
use tonic_rdma_tensor::{Arrived, Dtype, SentCounts, Shape, Tensor, TensorSpec};
use tonic_rdma_verbs::memory::RegisteredBuf;

use crate::array::{Array, allocate, count_copied};
use crate::completions::Value;
use crate::error::to_py;
use crate::memory::Elements;
use crate::regions::DeviceRegion;
use crate::runtime::runtime;
use crate::waits::{Exclusive, Life, Made, Pending};

/// Returns the tensor that `object` is: an array, or a list or an array of numpy of strings.
///
/// # Errors
/// It is neither.
fn tensor_of(object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    match strings_in(object)? {
        Some(strings) => Ok(strings),
        None => Elements::of(object)?.into_tensor(object.py()),
    }
}

/// Returns the tensor of a list or an array of numpy of strings; `None` for any other array.
///
/// # Errors
/// It has something else, too.
pub(crate) fn strings_in(object: &Bound<'_, PyAny>) -> PyResult<Option<Tensor>> {
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        return strings_of(object, &[object.len()? as u64]).map(Some);
    }
    let kind = object.getattr("dtype").and_then(|dtype| dtype.getattr("kind"));
    if kind.is_ok_and(|kind| kind.extract::<String>().is_ok_and(|kind| "OSU".contains(&kind))) {
        let shape: Vec<u64> = object.getattr("shape")?.extract()?;
        return strings_of(&object.call_method0("ravel")?.call_method0("tolist")?, &shape).map(Some);
    }
    Ok(None)
}

fn strings_of(strings: &Bound<'_, PyAny>, shape: &[u64]) -> PyResult<Tensor> {
    let string = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        match (item.cast::<PyBytes>(), item.cast::<PyString>()) {
            (Ok(bytes), _) => Ok(bytes.as_bytes().to_vec()),
            (_, Ok(text)) => Ok(text.to_cow()?.into_owned().into_bytes()),
            _ => Err(PyTypeError::new_err(format!(
                "takes an array, or a list of bytes or str: an item is a {}",
                item.get_type().name()?
            ))),
        }
    };
    let strings: Vec<Vec<u8>> = strings.try_iter()?.map(string).collect::<PyResult<_>>()?;
    Tensor::from_strings(Shape::new(shape).map_err(to_py)?, strings).map_err(to_py)
}

/// The most lists that a tensor without strings becomes: a peer can name any shape.
const EMPTY_LISTS: usize = 1 << 20;

/// A tensor that has arrived: an `Array`, or nested lists of `bytes`.
#[derive(Debug)]
pub(crate) struct Received(pub(crate) Tensor);

impl Value for Received {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        if self.0.dtype() != Dtype::String {
            return Ok(Py::new(py, Array::of_tensor(&self.0)?)?.into_any());
        }
        let mut level: Vec<Py<PyAny>> = Vec::new();
        for string in self.0.strings().map_err(to_py)? {
            level.push(PyBytes::new(py, string).into_any().unbind());
        }
        let dims = self.0.shape().dims();
        for (axis, &length) in dims.iter().enumerate().skip(1).rev() {
            let (lists, length) = (dims[..axis].iter().product::<u64>() as usize, length as usize);
            if lists > level.len().max(EMPTY_LISTS) {
                let shape = self.0.shape();
                return Err(PyValueError::new_err(format!("no strings, in lists of the shape {shape}")));
            }
            let part = |list: usize| &level[list * length..(list + 1) * length];
            let lists = (0..lists).map(|list| Ok(PyList::new(py, part(list))?.into_any().unbind()));
            level = lists.collect::<PyResult<_>>()?;
        }
        match self.0.shape().rank() {
            0 => level.pop().ok_or_else(|| PyValueError::new_err("a tensor without its element")),
            _ => Ok(PyList::new(py, level)?.into_any().unbind()),
        }
    }
}

/// The receiving side of a static slot.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct StaticReceiver {
    slot: Exclusive<StaticSlot>,
    spec: TensorSpec,
}

/// A static slot, and memory for the next tensor that is copied out of it. Without memory it stays there.
struct StaticSlot {
    slot: tensor::StaticReceiver,
    next: Option<RegisteredBuf>,
}

const RECEIVER: &str = "receiver";
const ARRIVAL: &str = "the arrival of a tensor";

impl StaticReceiver {
    pub(crate) fn new(slot: tensor::StaticReceiver, life: Life) -> Self {
        let (spec, slot) = (*slot.spec(), StaticSlot { slot, next: None });
        Self { slot: Exclusive::new(RECEIVER, slot, life), spec }
    }
}

/// Copies a tensor out of its buffer.
fn copy_out(arrived: &Arrived<'_>, bytes: &mut [u8]) -> PyResult<()> {
    arrived.copy_to(bytes).map_err(to_py)?;
    count_copied(bytes.len());
    Ok(())
}

impl StaticSlot {
    /// Returns a new array with the content of a tensor that has arrived, if one has.
    fn take(&mut self) -> PyResult<Option<Array>> {
        let spec = *self.slot.spec();
        let mut copy = match self.next.take() {
            Some(memory) => memory,
            None => allocate(spec.bytes().unwrap_or(0) as usize)?,
        };
        match self.slot.try_recv().map_err(to_py)? {
            Some(arrived) => copy_out(&arrived, &mut copy)?,
            None => {
                self.next = Some(copy);
                return Ok(None);
            }
        }
        Array::of_pool(spec, copy).map(Some)
    }

    /// Copies a tensor that has arrived to `target`. Returns whether one has.
    fn take_into(&mut self, target: &mut Elements) -> PyResult<bool> {
        let Some(arrived) = self.slot.try_recv().map_err(to_py)? else { return Ok(false) };
        copy_out(&arrived, target.writable()?)?;
        Ok(true)
    }

    async fn arrived(&mut self) -> PyResult<()> {
        self.slot.arrived().await.map_err(to_py)
    }
}

impl StaticReceiver {
    /// Returns the elements of `array`, which a tensor of this slot can be copied to.
    fn target(&self, array: &Bound<'_, PyAny>) -> PyResult<Elements> {
        let mut elements = Elements::of(array)?;
        if *elements.spec() != self.spec {
            let found = elements.spec();
            return Err(PyValueError::new_err(format!("array: takes {}, not {found}", self.spec)));
        }
        elements.writable()?;
        Ok(elements)
    }
}

#[pymethods]
impl StaticReceiver {
    fn recv(&self, timeout: Option<f64>) -> PyResult<Pending> {
        self.slot.pending(timeout, ARRIVAL, |slot| {
            Box::pin(async move {
                loop {
                    slot.arrived().await?;
                    if let Some(array) = slot.take()? {
                        return Ok(Made(array));
                    }
                }
            })
        })
    }

    fn recv_into(&self, array: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<Pending> {
        let mut target = self.target(array)?;
        self.slot.pending(timeout, ARRIVAL, |slot| {
            Box::pin(async move {
                loop {
                    slot.arrived().await?;
                    if slot.take_into(&mut target)? {
                        return Ok(());
                    }
                }
            })
        })
    }

    fn arrived(&self, timeout: Option<f64>) -> PyResult<Pending> {
        self.slot.pending(timeout, ARRIVAL, |slot| Box::pin(slot.arrived()))
    }

    fn try_recv(&self, py: Python<'_>) -> PyResult<Option<Array>> {
        Ok(self.slot.now(py, StaticSlot::take)?.flatten())
    }

    fn try_recv_into(&self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<bool> {
        let mut target = self.target(array)?;
        Ok(self.slot.now(py, |slot| slot.take_into(&mut target))?.unwrap_or(false))
    }

    fn close(&self, py: Python<'_>) {
        self.slot.close(py);
    }
}

/// The receiving side of a dynamic slot.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct DynamicReceiver {
    slot: Exclusive<tensor::DynamicReceiver>,
}

impl DynamicReceiver {
    pub(crate) fn new(slot: tensor::DynamicReceiver, life: Life) -> Self {
        Self { slot: Exclusive::new(RECEIVER, slot, life) }
    }
}

#[pymethods]
impl DynamicReceiver {
    fn recv(&self, timeout: Option<f64>) -> PyResult<Pending> {
        self.slot.pending(timeout, ARRIVAL, |slot| {
            Box::pin(async move { slot.recv().await.map(Received).map_err(to_py) })
        })
    }

    fn arrived(&self, timeout: Option<f64>) -> PyResult<Pending> {
        self.slot
            .pending(timeout, ARRIVAL, |slot| Box::pin(async move { slot.arrived().await.map_err(to_py) }))
    }

    fn try_recv(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let tensor = self.slot.now(py, |slot| slot.try_recv().map_err(to_py))?.flatten();
        tensor.map(|tensor| Box::new(Received(tensor)).into_python(py)).transpose()
    }

    fn close(&self, py: Python<'_>) {
        self.slot.close(py);
    }
}

/// What a sender has sent. Any thread may look, also during an operation.
#[derive(Clone, Default)]
struct Sent(Arc<Mutex<SentCounts>>);

impl Sent {
    fn note(&self, sent: SentCounts) {
        let before = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), sent);
        count_copied(sent.copied.bytes.saturating_sub(before.copied.bytes) as usize);
    }

    /// Returns pairs (tensors, bytes): sent in place, with a copy, and inline.
    fn counts(&self) -> [(u64, u64); 3] {
        let sent = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        [sent.in_place, sent.copied, sent.inline].map(|of| (of.tensors, of.bytes))
    }
}

const SENDER: &str = "sender";
const SENT: &str = "the end of a send";
const READ: &str = "the read of all tensors by the receiver";

/// The sending side of a static slot.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct StaticSender {
    slot: Exclusive<tensor::StaticSender>,
    spec: TensorSpec,
    sent: Sent,
}

impl StaticSender {
    pub(crate) fn new(slot: tensor::StaticSender, life: Life) -> Self {
        let spec = *slot.spec();
        Self { slot: Exclusive::new(SENDER, slot, life), spec, sent: Sent::default() }
    }
}

#[pymethods]
impl StaticSender {
    fn send(&self, array: &Bound<'_, PyAny>, wait: bool, timeout: Option<f64>) -> PyResult<Pending> {
        runtime()?;
        let elements = Elements::of(array)?;
        if *elements.spec() != self.spec {
            let found = elements.spec();
            return Err(PyValueError::new_err(format!("array: takes {}, not {found}", self.spec)));
        }
        let region = elements.is_contiguous().then(|| DeviceRegion::find(elements.bytes())).flatten();
        let region = region.filter(|(_, at)| *at == 0);
        let tensor = elements.into_tensor(array.py())?;
        let sent = self.sent.clone();
        self.slot.pending(timeout, SENT, move |slot| {
            Box::pin(async move {
                if let Some((region, _)) = region {
                    slot.ready().await.map_err(to_py)?;
                    if let Some(taken) = region.take().await {
                        let sending = taken.operate(|region| slot.try_send_region(region));
                        sent.note(slot.sent());
                        return if wait { sending.await.map_err(to_py) } else { Ok(()) };
                    }
                }
                let result = if wait { send_to_end(slot, &tensor).await } else { slot.send(&tensor).await };
                sent.note(slot.sent());
                result.map_err(to_py)
            })
        })
    }

    fn flush(&self, timeout: Option<f64>) -> PyResult<Pending> {
        self.slot.pending(timeout, READ, |slot| Box::pin(async move { slot.flush().await.map_err(to_py) }))
    }

    fn sent(&self) -> [(u64, u64); 3] {
        self.sent.counts()
    }

    fn close(&self, py: Python<'_>) {
        self.slot.close(py);
    }
}

/// The sending side of a dynamic slot.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct DynamicSender {
    slot: Exclusive<tensor::DynamicSender>,
    sent: Sent,
}

impl DynamicSender {
    pub(crate) fn new(slot: tensor::DynamicSender, life: Life) -> Self {
        Self { slot: Exclusive::new(SENDER, slot, life), sent: Sent::default() }
    }
}

#[pymethods]
impl DynamicSender {
    fn send(&self, array: &Bound<'_, PyAny>, wait: bool, timeout: Option<f64>) -> PyResult<Pending> {
        let (tensor, sent) = (tensor_of(array)?, self.sent.clone());
        self.slot.pending(timeout, SENT, move |slot| {
            Box::pin(async move {
                let before = slot.sent().in_place.tensors;
                slot.send(&tensor).await.map_err(to_py)?;
                sent.note(slot.sent());
                match wait && slot.sent().in_place.tensors > before {
                    true => slot.flush().await.map_err(to_py),
                    false => Ok(()),
                }
            })
        })
    }

    fn flush(&self, timeout: Option<f64>) -> PyResult<Pending> {
        self.slot.pending(timeout, READ, |slot| Box::pin(async move { slot.flush().await.map_err(to_py) }))
    }

    fn sent(&self) -> [(u64, u64); 3] {
        self.sent.counts()
    }

    fn close(&self, py: Python<'_>) {
        self.slot.close(py);
    }
}
