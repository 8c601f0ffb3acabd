//! The variables of a model, or the gradients for them: what one process holds and sends.

use std::sync::Arc;

use bytes::Bytes;
use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};

use crate::failure::Failure;
use crate::measure::payload::content::{self, Content, VARIANTS};
use crate::measure::payload::reduce::{Reduced, reduce_all};
use crate::seeded::mix;
use crate::units;
use crate::workload::{Model, Variable};

/// Whose tensors they are: everybody's content differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The variables themselves.
    Server,
    /// This worker's gradients.
    Worker(u32),
}

/// What is known of somebody's tensors to whoever receives them: types, shapes, and what they contain.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    seed: u64,
    tensors: Arc<[TensorSpan]>,
    room: u64,
}

/// A tensor's place among the others.
#[derive(Debug)]
struct TensorSpan {
    spec: TensorSpec,
    length: usize,
    offset: usize,
}

impl Layout {
    /// Of `origin`'s tensors of `model`, each beginning on a cache line.
    pub(crate) fn new(model: Model, origin: Origin) -> Result<Self, Failure> {
        let mut room = 0;
        let place = |variable: &Variable| {
            let offset = room as usize;
            room += Content::room(variable.bytes());
            let shape = Shape::new(variable.shape());
            let spec = shape.and_then(|shape| TensorSpec::new(Dtype::F32, shape));
            let spec = spec.map_err(|error| Failure::run(format!("a variable of {model:?}: {error}")))?;
            Ok(TensorSpan { spec, length: variable.bytes() as usize, offset })
        };
        let tensors = model.variables().iter().map(place).collect::<Result<Arc<[_]>, Failure>>()?;
        let number = match origin {
            Origin::Server => 0,
            Origin::Worker(worker) => u64::from(worker) + 1,
        };
        let seed = model.name().bytes().fold(number, |seed, byte| mix(seed ^ u64::from(byte)));
        Ok(Self { seed, tensors, room })
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Type and shape of each.
    pub(crate) fn specs(&self) -> impl Iterator<Item = &TensorSpec> {
        self.tensors.iter().map(|place| &place.spec)
    }

    /// Length in bytes, and seed in mini-batch `step`, of tensor `index`; nothing if there are not as many.
    pub(crate) fn expected(&self, index: usize, step: u64) -> Option<(usize, u64)> {
        let place = self.tensors.get(index)?;
        let seed = Content::variant_seed(self.seed, variant(step));
        Some((place.length, seed.wrapping_add(place.offset as u64 / 8)))
    }
}

/// Which of the contents a mini-batch has.
pub(crate) fn variant(step: u64) -> usize {
    (step % VARIANTS as u64) as usize
}

/// Tensors with their content, all in one stretch of memory that is registered once, in which every mode has them.
#[derive(Debug)]
pub(crate) struct Variables {
    layout: Layout,
    content: Content,
    /// Keeps count of the memory.
    _pool: Pool,
}

impl Variables {
    /// Makes `origin`'s tensors of `model`.
    pub(crate) fn new(model: Model, origin: Origin) -> Result<Self, Failure> {
        let layout = Layout::new(model, origin)?;
        let bytes = Content::with_variants(layout.room);
        let pool = Pool::for_sending(bytes.next_multiple_of(2 << 20));
        let memory = pool.allocate(bytes as usize);
        let mut memory = memory.map_err(|error| {
            Failure::run(format!("no memory for variables of {}: {error}", units::rough_size(bytes)))
        })?;
        content::fill(layout.seed, &mut memory);
        let content = Content::over(memory.freeze(), layout.seed);
        Ok(Self { layout, content, _pool: pool })
    }

    /// Types, shapes, contents.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Tensor `index` as it is in mini-batch `step`; nothing if there are not as many.
    pub(crate) fn bytes(&self, index: usize, step: u64) -> Option<Bytes> {
        let place = self.layout.tensors.get(index)?;
        Some(self.content.variant(variant(step)).at(place.offset).cut(place.length))
    }

    /// The same as a tensor, where it lies in registered memory.
    pub(crate) fn tensor(&self, index: usize, step: u64) -> Result<Tensor, Failure> {
        let (Some(place), Some(bytes)) = (self.layout.tensors.get(index), self.bytes(index, step)) else {
            return Err(Failure::run(format!("there is no variable {index}")));
        };
        Tensor::from_bytes(place.spec, bytes)
            .map_err(|error| Failure::run(format!("variable {index} is no tensor: {error}")))
    }

    /// What consuming all tensors finds, by variant.
    pub(crate) fn reduced(&self) -> [Reduced; VARIANTS] {
        std::array::from_fn(|variant| {
            let all: Vec<Bytes> =
                (0..self.layout.len()).filter_map(|index| self.bytes(index, variant as u64)).collect();
            reduce_all(all.iter().map(|bytes| &bytes[..]))
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn tensors_are_the_model_s_in_registered_memory_and_what_receivers_expect() {
        let variables = Variables::new(Model::Gru, Origin::Worker(1)).unwrap();
        let model = Model::Gru.variables();
        assert_eq!(variables.layout().len(), model.len());
        for step in [0, 1, 6] {
            for (index, variable) in model.iter().enumerate() {
                let tensor = variables.tensor(index, step).unwrap();
                let (length, seed) = variables.layout().expected(index, step).unwrap();
                assert_eq!((tensor.shape().dims(), length as u64), (variable.shape(), variable.bytes()));
                assert!(tensor.registered().is_some());
                assert_eq!(content::check_stamps(seed, tensor.bytes().unwrap(), step), None);
                let (_, other) = variables.layout().expected(index, step + 1).unwrap();
                assert_eq!(content::check_stamps(other, tensor.bytes().unwrap(), step), Some(0));
            }
        }
        assert!(variables.bytes(model.len(), 0).is_none() && variables.tensor(model.len(), 0).is_err());
        assert!(variables.layout().expected(model.len(), 0).is_none());
    }

    #[test]
    fn nobody_s_content_is_another_s() {
        let seed = |model, origin| Layout::new(model, origin).unwrap().expected(0, 0).unwrap().1;
        let seeds = [
            seed(Model::Gru, Origin::Server),
            seed(Model::Gru, Origin::Worker(0)),
            seed(Model::Gru, Origin::Worker(1)),
            seed(Model::Lstm, Origin::Server),
        ];
        assert!((1..seeds.len()).all(|index| !seeds[..index].contains(&seeds[index])));
    }
}
