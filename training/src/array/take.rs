//! Takes the vector out of a tensor of candle.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, Error, InplaceOp1, Layout, Result, Storage, Tensor};

/// An operation that moves the vector out of a tensor.
struct Take(Mutex<Option<Vec<f32>>>);

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let CpuStorage::F32(values) = storage else {
            return Err(Error::Msg("only float32 numbers can be taken out of a tensor".to_owned()));
        };
        let whole = layout.contiguous_offsets() == Some((0, values.len()));
        if whole {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::mem::take(values));
        }
        Ok(())
    }
}

/// Returns the elements, row-major. They are moved if they fill the vector, and copied otherwise.
pub(super) fn vector(tensor: &Tensor) -> Result<Vec<f32>> {
    let take = Take(Mutex::new(None));
    tensor.inplace_op1(&take)?;
    match take.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(values) => Ok(values),
        None => tensor.flatten_all()?.to_vec1(),
    }
}

/// Returns the elements, row-major, each changed by `change`.
pub(super) fn mapped(tensor: &Tensor, change: impl Fn(f32) -> f32) -> Result<Vec<f32>> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(values)), Some((from, to))) = (&*storage, layout.contiguous_offsets())
    else {
        return Err(Error::Msg("only float32 numbers can be changed one by one".to_owned()));
    };
    Ok(values.get(from..to).unwrap_or(&[]).iter().map(|value| change(*value)).collect())
}
