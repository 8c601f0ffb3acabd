//! Files of the safetensors format.

use std::borrow::Cow;

use bytes::Bytes;
use safetensors::{SafeTensors, View};

use crate::{Dtype, Shape, Tensor, TensorError, TensorErrorKind, TensorSpec};

/// The tensors of a file.
#[derive(Debug)]
pub struct Safetensors {
    /// The tensors with their names, in the order of their bytes in the file.
    pub tensors: Vec<(String, Tensor)>,
    /// Number of bytes that were copied, because the file does not align them for their type. All other bytes
    /// stay in the memory of the file.
    pub copied: u64,
}

impl Safetensors {
    /// Reads the tensors of `file`. A tensor shares the file's memory if it is aligned there.
    ///
    /// ```
    /// use tonic_rdma_tensor::convert::{Safetensors, SafetensorsView};
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// let weights = Tensor::copy_from(TensorSpec::new(Dtype::U8, Shape::new(&[2])?)?, &[1, 2])?;
    /// let view = SafetensorsView::new(&weights)?;
    /// let file = bytes::Bytes::from(safetensors::serialize([("weights", &view)], None)?);
    ///
    /// let found = Safetensors::read(&file)?;
    /// assert_eq!(found.tensors[0].0, "weights");
    /// assert_eq!(found.tensors[0].1.as_slice::<u8>()?, [1, 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `file` does not have the format, or has a tensor with an unknown type or shape. The error names this
    /// tensor.
    pub fn read(file: &Bytes) -> Result<Self, TensorError> {
        let parsed = SafeTensors::deserialize(file)
            .map_err(|error| foreign("the file does not have the format", error))?;
        let mut found: Vec<_> = parsed.iter().collect();
        found.sort_by_key(|(_, view)| view.data().as_ptr());
        let mut copied = 0;
        let mut tensors = Vec::with_capacity(found.len());
        for (name, view) in found {
            let named = |error: TensorError| foreign(&format!("tensor `{name:.100}`"), error);
            let spec = spec(&view).map_err(named)?;
            // `slice_ref` panics for an empty slice outside the file.
            let bytes = if view.data().is_empty() { Bytes::new() } else { file.slice_ref(view.data()) };
            let tensor = match Tensor::from_bytes(spec, bytes) {
                Err(error) if error.kind() == TensorErrorKind::Layout => {
                    copied += view.data().len() as u64;
                    Tensor::copy_from(spec, view.data())
                }
                other => other,
            };
            tensors.push((name.to_owned(), tensor.map_err(named)?));
        }
        Ok(Self { tensors, copied })
    }
}

fn spec(view: &safetensors::tensor::TensorView<'_>) -> Result<TensorSpec, TensorError> {
    let dtype: Dtype = view.dtype().to_string().parse()?;
    let dims: Vec<u64> = view.shape().iter().map(|&length| length as u64).collect();
    TensorSpec::new(dtype, Shape::new(&dims)?)
}

/// A tensor that `safetensors` can write: `safetensors::serialize([("name", view)], None)`.
#[derive(Debug)]
pub struct SafetensorsView {
    tensor: Tensor,
    bytes: Bytes,
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
}

impl SafetensorsView {
    /// Makes the view of `tensor`. It copies a tensor whose elements are not contiguous.
    ///
    /// ```
    /// use tonic_rdma_tensor::convert::SafetensorsView;
    /// use tonic_rdma_tensor::{Dtype, Shape, TensorMut, TensorSpec};
    ///
    /// let weights = TensorMut::zeroed(TensorSpec::new(Dtype::F32, Shape::new(&[16])?)?)?.freeze();
    /// let view = SafetensorsView::new(&weights)?;
    /// let file: Vec<u8> = safetensors::serialize([("weights", &view)], None)?;
    /// # assert!(file.len() > 64);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The format does not have the type of the elements, or the system has no memory.
    pub fn new(tensor: &Tensor) -> Result<Self, TensorError> {
        let dtype = safetensors_dtype(tensor.dtype()).ok_or_else(|| {
            let dtype = tensor.dtype();
            TensorError::argument(format!("safetensors: the format has no type for elements of {dtype}"))
        })?;
        let tensor = tensor.to_contiguous()?;
        let bytes = tensor.to_bytes()?;
        let shape = tensor.shape().dims().iter().map(|&length| length as usize).collect();
        Ok(Self { tensor, bytes, dtype, shape })
    }

    /// Returns the tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl View for &SafetensorsView {
    fn dtype(&self) -> safetensors::Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn safetensors_dtype(dtype: Dtype) -> Option<safetensors::Dtype> {
    use safetensors::Dtype as FileDtype;
    Some(match dtype {
        Dtype::F16 => FileDtype::F16,
        Dtype::Bf16 => FileDtype::BF16,
        Dtype::F32 => FileDtype::F32,
        Dtype::F64 => FileDtype::F64,
        Dtype::F8E4M3 => FileDtype::F8_E4M3,
        Dtype::F8E5M2 => FileDtype::F8_E5M2,
        Dtype::I8 => FileDtype::I8,
        Dtype::I16 => FileDtype::I16,
        Dtype::I32 => FileDtype::I32,
        Dtype::I64 => FileDtype::I64,
        Dtype::U8 => FileDtype::U8,
        Dtype::U16 => FileDtype::U16,
        Dtype::U32 => FileDtype::U32,
        Dtype::U64 => FileDtype::U64,
        Dtype::Bool => FileDtype::BOOL,
        Dtype::Complex64 => FileDtype::C64,
        Dtype::Complex128 | Dtype::String => return None,
    })
}

fn foreign(fault: &str, error: impl std::error::Error + Send + Sync + 'static) -> TensorError {
    TensorError::argument(format!("safetensors: {fault}: {error}")).because(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorMut;

    fn tensor(dtype: Dtype, dims: &[u64]) -> Tensor {
        let spec = TensorSpec::new(dtype, Shape::new(dims).unwrap()).unwrap();
        let mut tensor = TensorMut::zeroed(spec).unwrap();
        for (place, byte) in tensor.bytes_mut().iter_mut().enumerate() {
            *byte = place as u8 & 1;
        }
        tensor.freeze()
    }

    /// Returns a file that lies `shift` bytes after an aligned address.
    fn file(tensors: &[(&str, &Tensor)], shift: usize) -> Bytes {
        let views: Vec<_> =
            tensors.iter().map(|(name, tensor)| (*name, SafetensorsView::new(tensor).unwrap())).collect();
        let file = safetensors::serialize(views.iter().map(|(name, view)| (*name, view)), None).unwrap();
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[(file.len() + shift) as u64]).unwrap()).unwrap();
        let mut memory = TensorMut::zeroed(spec).unwrap();
        memory.bytes_mut()[shift..].copy_from_slice(&file);
        memory.freeze().to_bytes().unwrap().slice(shift..)
    }

    #[test]
    fn every_type_survives_a_file() {
        for dtype in Dtype::all() {
            let dims = [2, 3];
            if let Some(name) = dtype.safetensors_name() {
                assert_eq!(safetensors_dtype(dtype).unwrap().to_string(), name);
                let tensor = tensor(dtype, &dims);
                let read = Safetensors::read(&file(&[("t", &tensor)], 0)).unwrap();
                assert_eq!(read.tensors[0].1.spec(), tensor.spec());
                assert_eq!(read.tensors[0].1.bytes(), tensor.bytes());
            } else {
                assert!(safetensors_dtype(dtype).is_none());
            }
        }
        let strings = Tensor::from_strings(Shape::new(&[1]).unwrap(), ["a"]).unwrap();
        assert!(SafetensorsView::new(&strings).unwrap_err().to_string().contains("string"));
    }

    #[test]
    fn aligned_tensors_stay_in_the_file_and_others_are_copied() {
        let (weights, none) = (tensor(Dtype::F32, &[4, 5]), tensor(Dtype::I64, &[0, 7]));
        for (shift, copied) in [(0, 0), (8, 0), (2, 80)] {
            let file = file(&[("weights", &weights), ("none", &none)], shift);
            let read = Safetensors::read(&file).unwrap();
            assert_eq!(read.copied, copied, "at {shift}");
            let found = &read.tensors.iter().find(|(name, _)| name == "weights").unwrap().1;
            assert_eq!(found.bytes(), weights.bytes());
            let within = file.as_ptr_range().contains(&found.bytes().unwrap().as_ptr());
            assert_eq!(within, copied == 0);
        }
    }

    #[test]
    fn a_transposed_tensor_is_written_in_order() {
        let weights = tensor(Dtype::U16, &[2, 3]).transpose();
        let read = Safetensors::read(&file(&[("t", &weights)], 0)).unwrap();
        assert_eq!(read.tensors[0].1.bytes().unwrap(), weights.to_contiguous().unwrap().bytes().unwrap());
    }

    #[test]
    fn hostile_files_are_errors() {
        let deep =
            format!("{{\"deep\":{{\"dtype\":\"U8\",\"shape\":{:?},\"data_offsets\":[0,1]}}}}", [1; 17]);
        let strange = "{\"odd\":{\"dtype\":\"F8_E8M0\",\"shape\":[1],\"data_offsets\":[0,1]}}".to_owned();
        let cases = [(deep, "`deep`"), (strange, "`odd`"), ("{".to_owned(), "safetensors")];
        for (header, expected) in cases {
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend_from_slice(header.as_bytes());
            file.push(1);
            let error = Safetensors::read(&file.into()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        for file in [Bytes::new(), Bytes::from(vec![0xff; 64])] {
            assert!(Safetensors::read(&file).is_err());
        }
    }
}
