//! Memory of a device: where the region of an array is, and operations on regions of peers.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use tokio::sync::Notify;
use tonic_rdma_tensor as tensor;
use tonic_rdma_tensor::unstable::noticed;
use tonic_rdma_tensor::{
    BlockCopy, Channel, Dtype, MemRegion, Memcpy, RdmaDevice, Rights, SharedRegion, TensorError,
    TransferError,
};
use tonic_rdma_verbs::unstable::RegionMapping;

use crate::array::count_copied;
use crate::error::to_py;
use crate::memory::Elements;
use crate::waits::{Closable, Life, Pending, drop_inside};

/// The memory of an array that a device made. The array and its views stay valid wherever the region is.
#[derive(Debug)]
pub(crate) struct DeviceRegion {
    mapping: RegionMapping,
    place: Mutex<Place>,
    /// Notified when the region comes back from an operation.
    returned: Notify,
}

/// Where a region is.
#[derive(Debug)]
enum Place {
    Here(MemRegion),
    /// In an operation, which gives it back.
    Moved,
    /// Peers may have rights to it.
    Shared(SharedRegion),
    /// An operation ended without it.
    Lost,
}

/// The regions of all arrays, by address: views of an array are found here.
static REGIONS: Mutex<BTreeMap<usize, Weak<DeviceRegion>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeviceRegion {
    pub(crate) fn new(region: MemRegion) -> Arc<Self> {
        let mapping = RegionMapping::of(&region);
        let address = mapping.as_ptr() as usize;
        let made =
            Arc::new(Self { mapping, place: Mutex::new(Place::Here(region)), returned: Notify::new() });
        lock(&REGIONS).insert(address, Arc::downgrade(&made));
        made
    }

    /// Keeps the memory.
    pub(crate) fn mapping(&self) -> &RegionMapping {
        &self.mapping
    }

    /// Returns the region that has all of `bytes`, and their offset in it.
    pub(crate) fn find(bytes: &[u8]) -> Option<(Arc<Self>, usize)> {
        let address = bytes.as_ptr() as usize;
        let found = lock(&REGIONS).range(..=address).next_back().and_then(|(_, region)| region.upgrade())?;
        let offset = address - found.mapping.as_ptr() as usize;
        (offset.checked_add(bytes.len())? <= found.mapping.len()).then_some((found, offset))
    }

    /// Takes the region for an operation, once no other operation has it. `None` if peers have rights to it.
    pub(crate) async fn take(self: &Arc<Self>) -> Option<Taken> {
        loop {
            let returned = self.returned.notified();
            if let Some(found) = self.take_now() {
                return found.map(|region| Taken { region: Some(region), home: Arc::clone(self) });
            }
            returned.await;
        }
    }

    /// Takes the region. `None` if an operation has it, and `Some(None)` if it can't be taken.
    fn take_now(&self) -> Option<Option<MemRegion>> {
        let mut place = lock(&self.place);
        let other = match std::mem::replace(&mut *place, Place::Moved) {
            Place::Here(region) => return Some(Some(region)),
            Place::Moved => return None,
            Place::Shared(shared) => match shared.try_into_region() {
                Ok(region) => return Some(Some(region)),
                Err(shared) => Place::Shared(shared),
            },
            Place::Lost => Place::Lost,
        };
        *place = other;
        Some(None)
    }

    /// Returns the memory as peers may use it; `None` while an operation has it.
    fn share(&self) -> Option<SharedRegion> {
        let mut place = lock(&self.place);
        let shared = match std::mem::replace(&mut *place, Place::Moved) {
            Place::Here(region) => region.share(),
            Place::Shared(shared) => shared,
            other => {
                *place = other;
                return None;
            }
        };
        *place = Place::Shared(shared.clone());
        Some(shared)
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        // The memory is this region's until it is dropped, so the entry is, too.
        lock(&REGIONS).remove(&(self.mapping.as_ptr() as usize));
    }
}

/// A region that an operation has taken. It goes home when this is dropped.
pub(crate) struct Taken {
    region: Option<MemRegion>,
    home: Arc<DeviceRegion>,
}

impl Taken {
    /// Begins an operation with the region, which goes back to its array when the operation
    /// has ended, also if the wait for it was given up.
    pub(crate) fn operate(mut self, begin: impl FnOnce(MemRegion) -> Memcpy) -> Operating {
        Operating(self.region.take().map(|region| (begin(region), self)))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *lock(&self.home.place) = self.region.take().map_or(Place::Lost, Place::Here);
        self.home.returned.notify_waiters();
    }
}

/// An operation with a region of an array. Dropping it does not end the operation.
pub(crate) struct Operating(Option<(Memcpy, Taken)>);

/// Sends the region of `result` home.
fn go_home(mut taken: Taken, result: Result<MemRegion, TransferError>) -> Result<(), TensorError> {
    let (region, result) = match result {
        Ok(region) => (region, Ok(())),
        Err(error) => {
            let (region, error) = error.into_parts();
            (region, Err(error))
        }
    };
    taken.region = Some(region);
    result
}

impl Future for Operating {
    type Output = Result<(), TensorError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some((memcpy, _)) = &mut self.0 else { return Poll::Pending };
        let result = ready!(Pin::new(memcpy).poll(context));
        Poll::Ready(self.0.take().map_or(Ok(()), |(_, taken)| go_home(taken, result)))
    }
}

impl Drop for Operating {
    fn drop(&mut self) {
        if let Some((memcpy, taken)) = self.0.take() {
            memcpy.on_completion(|result| drop(go_home(taken, result)));
        }
    }
}

/// Returns the blocks of an operation on an array of `available` bytes: all of it without `blocks`.
///
/// # Errors
/// `blocks` is neither a sequence of (local, remote, length) nor an array of three 64-bit integers a row, or a
/// block is not within the array.
fn blocks_of(blocks: Option<&Bound<'_, PyAny>>, available: usize) -> PyResult<Vec<BlockCopy>> {
    let block = |[local, remote, length]: [u64; 3]| BlockCopy { local, remote, length };
    let Some(blocks) = blocks else {
        return Ok(vec![block([0, 0, available as u64])]);
    };
    let blocks: Vec<BlockCopy> = if blocks.is_instance_of::<PyList>() || blocks.is_instance_of::<PyTuple>() {
        let rows = blocks.extract::<Vec<[u64; 3]>>();
        let wrong = |error| {
            PyValueError::new_err(format!(
                "blocks: takes tuples (local, remote, length) of numbers of bytes from 0 on: {error}"
            ))
        };
        rows.map_err(wrong)?.into_iter().map(block).collect()
    } else {
        let table = Elements::of(blocks).map_err(|error| {
            let takes = "blocks: takes a list of tuples (local, remote, length), or an array of int64 of shape (n, 3)";
            let wrong = PyTypeError::new_err(takes);
            wrong.set_cause(blocks.py(), Some(error));
            wrong
        })?;
        let spec = *table.spec();
        if !matches!((spec.dtype(), spec.shape().dims()), (Dtype::I64 | Dtype::U64, [_, 3])) {
            return Err(PyValueError::new_err(format!(
                "blocks: takes tuples (local, remote, length), or an array of int64 of shape (n, 3), not {spec}"
            )));
        }
        let mut bytes = vec![0; table.length()];
        table.copy_to(&mut bytes);
        let numbers = bytes.chunks_exact(8);
        let numbers: Vec<u64> =
            numbers.map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap_or_default())).collect();
        numbers.chunks_exact(3).map(|row| block([row[0], row[1], row[2]])).collect()
    };
    let outside = |it: &BlockCopy| it.local.checked_add(it.length).is_none_or(|end| end > available as u64);
    match blocks.iter().find(|it| outside(it)) {
        // A negative number of an array shows as what it is.
        Some(BlockCopy { local, length, .. }) => Err(PyValueError::new_err(format!(
            "blocks: {} bytes at offset {} do not lie within the array of {available}",
            *length as i64, *local as i64
        ))),
        None => Ok(blocks),
    }
}

/// Which way an operation moves bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write { notify: bool },
}

/// An operation between an array and a region of a peer.
pub(crate) struct RegionCopy {
    channel: Arc<Channel>,
    device: RdmaDevice,
    remote: tensor::RemoteRegion,
    offset: u64,
    direction: Direction,
    elements: Elements,
    blocks: Vec<BlockCopy>,
}

impl RegionCopy {
    /// # Errors
    /// The array is none, its elements are not contiguous, they are to be written and can't, or a block is not
    /// within the array.
    pub(crate) fn new(
        (channel, device): (Arc<Channel>, RdmaDevice),
        remote: &RemoteRegion,
        array: &Bound<'_, PyAny>,
        offset: u64,
        blocks: Option<&Bound<'_, PyAny>>,
        direction: Direction,
    ) -> PyResult<Self> {
        let mut elements = Elements::of(array)?;
        elements.check_contiguous()?;
        if direction == Direction::Read {
            elements.writable()?;
        }
        let blocks = blocks_of(blocks, elements.bytes().len())?;
        Ok(Self { channel, device, remote: remote.region.open()?, offset, direction, elements, blocks })
    }

    /// Carries the operation out: in place if a device made the array, otherwise by a copy.
    pub(crate) async fn run(mut self) -> PyResult<()> {
        if let Some((region, at)) = DeviceRegion::find(self.elements.bytes())
            && let Some(taken) = region.take().await
        {
            self.blocks.iter_mut().for_each(|block| block.local += at as u64);
            return taken.operate(|region| self.begin(region)).await.map_err(to_py);
        }
        // The blocks lie one after the other in the copy.
        let theirs = self.blocks.clone();
        let mut length = 0;
        for block in &mut self.blocks {
            block.local = length;
            length = length.saturating_add(block.length);
        }
        let pairs = || self.blocks.iter().zip(&theirs).map(|(copy, array)| (range(copy), range(array)));
        let mut staging =
            self.device.allocate(usize::try_from(length).unwrap_or(usize::MAX)).map_err(to_py)?;
        if self.direction != Direction::Read {
            let bytes = self.elements.bytes();
            pairs().for_each(|(copy, array)| staging[copy].copy_from_slice(&bytes[array]));
            count_copied(staging.len());
        }
        let staging = self.begin(staging).await.map_err(to_py)?;
        if self.direction == Direction::Read {
            let pairs: Vec<_> = pairs().collect();
            let bytes = self.elements.writable()?;
            pairs.into_iter().for_each(|(copy, array)| bytes[array].copy_from_slice(&staging[copy]));
            count_copied(staging.len());
        }
        Ok(())
    }

    fn begin(&self, region: MemRegion) -> Memcpy {
        match self.direction {
            Direction::Read => {
                self.channel.read(&self.remote).at(self.offset).blocks_into(region, &self.blocks)
            }
            Direction::Write { notify } => {
                let write = self.channel.write(&self.remote).at(self.offset).notify(notify);
                write.blocks_from(region, &self.blocks)
            }
        }
    }
}

/// Returns the bytes of a block, which are within the address space.
fn range(block: &BlockCopy) -> std::ops::Range<usize> {
    let [start, end] = [block.local, block.local + block.length].map(|at| at as usize);
    start..end
}

/// A region of a peer.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct RemoteRegion {
    region: Closable<tensor::RemoteRegion>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    nbytes: u64,
    #[pyo3(get)]
    readable: bool,
    #[pyo3(get)]
    writable: bool,
}

impl RemoteRegion {
    pub(crate) fn new(region: tensor::RemoteRegion) -> Self {
        let (name, nbytes, rights) = (region.name().to_owned(), region.len(), region.rights());
        let region = Closable::new("remote region", region);
        Self { region, name, nbytes, readable: rights.read, writable: rights.write }
    }
}

#[pymethods]
impl RemoteRegion {
    fn close(&self) {
        self.region.close();
    }
}

/// A region on offer to peers.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct ExportedRegion {
    region: Closable<Arc<tensor::ExportedRegion>>,
    life: Life,
}

const EXPORTED: &str = "exported region";
const NOTICE: &str = "a notice of a peer";

impl ExportedRegion {
    /// Offers the memory of `array` to the peers of `device`.
    ///
    /// # Errors
    /// `array` is no whole array of a device, an operation has its memory, or the name can't be used.
    pub(crate) fn new(
        device: &RdmaDevice,
        life: Life,
        name: &str,
        array: &Bound<'_, PyAny>,
        rights: Rights,
    ) -> PyResult<Self> {
        let elements = Elements::of(array)?;
        if elements.length() == 0 {
            return Err(PyValueError::new_err("array: takes one with elements"));
        }
        let region = elements.is_contiguous().then(|| DeviceRegion::find(elements.bytes())).flatten();
        let region = region.filter(|(region, at)| *at == 0 && region.mapping.len() == elements.bytes().len());
        let Some((region, _)) = region else {
            return Err(PyValueError::new_err("array: takes a whole array that Device.empty made"));
        };
        let Some(memory) = region.share() else {
            return Err(PyValueError::new_err("array: an operation uses it; export it when that has ended"));
        };
        let exported = device.export_shared(name, memory, rights).map_err(to_py)?;
        Ok(Self { region: Closable::new(EXPORTED, Arc::new(exported)), life })
    }
}

#[pymethods]
impl ExportedRegion {
    fn notice(&self, timeout: Option<f64>) -> PyResult<Pending> {
        let region = self.region.open()?;
        let notice = async move { region.notice().await.map_err(to_py) };
        Pending::new(timeout, NOTICE, self.life.limit(EXPORTED, notice))
    }

    fn arrived(&self, timeout: Option<f64>) -> PyResult<Pending> {
        let region = self.region.open()?;
        let arrived = async move { noticed(&region).await.map_err(to_py) };
        Pending::new(timeout, NOTICE, self.life.limit(EXPORTED, arrived))
    }

    fn try_notice(&self) -> PyResult<bool> {
        let region = self.region.open()?;
        let noticed = region.try_notice();
        drop_inside(region);
        Ok(noticed)
    }

    /// Ends the offer, and the rights of the peers.
    fn close(&self) {
        self.life.end();
        self.region.close();
    }
}

impl Drop for ExportedRegion {
    fn drop(&mut self) {
        self.life.end();
    }
}
