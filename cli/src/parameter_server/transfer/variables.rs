//! The tensors that one process holds and sends: the variables of a model, or the gradients for them.

use std::sync::Arc;

use bytes::Bytes;
use tonic_rdma::memory::Pool;
use tonic_rdma_commands::{Failure, units};
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};

use super::shard::Shard;
use crate::workload::{Model, Variable};
use tonic_rdma_payload::content::{self, Content, VARIANTS};
use tonic_rdma_payload::reduce::{Reduced, reduce_all};
use tonic_rdma_payload::seeded::mix;

/// The process that tensors come from. The contents of any two processes differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The server, with the variables.
    Server,
    /// This worker, with its gradients.
    Worker(u32),
}

/// The layout of a process's tensors for one server, as their receivers know it: types, shapes and contents. A tensor
/// has the number of its variable in the model.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    seed: u64,
    shard: Shard,
    tensors: Arc<[TensorSpan]>,
    room: u64,
}

/// A tensor's place in the memory.
#[derive(Debug)]
struct TensorSpan {
    spec: TensorSpec,
    length: usize,
    offset: usize,
}

impl Layout {
    /// Makes the layout of `origin`'s tensors of `model` that belong to `shard`. Each begins on a cache line.
    pub(crate) fn new(model: Model, origin: Origin, shard: Shard) -> Result<Self, Failure> {
        let mut room = 0;
        let place = |variable: &Variable| {
            let offset = room as usize;
            room += Content::room(variable.bytes());
            let shape = Shape::new(variable.shape());
            let spec = shape.and_then(|shape| TensorSpec::new(Dtype::F32, shape));
            let spec =
                spec.map_err(|error| Failure::run(format!("a variable of {model:?}")).because(error))?;
            Ok(TensorSpan { spec, length: variable.bytes() as usize, offset })
        };
        let variables = model.variables();
        let mine = shard.indices(variables.len()).filter_map(|index| variables.get(index));
        let tensors = mine.map(place).collect::<Result<Arc<[_]>, Failure>>()?;
        let number = match origin {
            Origin::Server => 0,
            Origin::Worker(worker) => u64::from(worker) + 1,
        };
        let number = number | (shard.number() as u64) << 32;
        let seed = model.name().bytes().fold(number, |seed, byte| mix(seed ^ u64::from(byte)));
        Ok(Self { seed, shard, tensors, room })
    }

    /// Returns the number of tensors.
    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Returns number, type and shape of each tensor.
    pub(crate) fn specs(&self) -> impl Iterator<Item = (usize, &TensorSpec)> {
        self.tensors.iter().enumerate().map(|(position, span)| (self.shard.index(position), &span.spec))
    }

    /// Returns the place of tensor `index`, or `None` if it is not here.
    fn span(&self, index: usize) -> Option<&TensorSpan> {
        self.tensors.get(self.shard.position(index)?)
    }

    /// Returns length in bytes, and seed in mini-batch `step`, of tensor `index`, or `None` if it is not here.
    pub(crate) fn expected(&self, index: usize, step: u64) -> Option<(usize, u64)> {
        let place = self.span(index)?;
        let seed = content::variant_seed(self.seed, variant(step));
        Some((place.length, seed.wrapping_add(place.offset as u64 / 8)))
    }
}

/// Returns the variant of the content that a mini-batch has.
pub(crate) fn variant(step: u64) -> usize {
    (step % VARIANTS as u64) as usize
}

/// Tensors with their content, all in one stretch of memory. It is registered once, and every mode uses it.
#[derive(Debug)]
pub(crate) struct Variables {
    layout: Layout,
    content: Content,
    /// Accounts for the memory.
    _pool: Pool,
}

impl Variables {
    /// Makes `origin`'s tensors of `model` that belong to `shard`.
    pub(crate) fn new(model: Model, origin: Origin, shard: Shard) -> Result<Self, Failure> {
        let layout = Layout::new(model, origin, shard)?;
        let bytes = Content::with_variants(layout.room);
        let pool = Pool::for_sending(bytes.next_multiple_of(2 << 20));
        let memory = pool.allocate(bytes as usize);
        let mut memory = memory.map_err(|error| {
            Failure::run(format!("no memory for variables of {}", units::rough_size(bytes))).because(error)
        })?;
        content::fill(layout.seed, &mut memory);
        let content = Content::over(memory.freeze(), layout.seed);
        Ok(Self { layout, content, _pool: pool })
    }

    /// Returns types, shapes and contents.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the bytes of tensor `index` in mini-batch `step`, or `None` if it is not here.
    pub(crate) fn bytes(&self, index: usize, step: u64) -> Option<Bytes> {
        let place = self.layout.span(index)?;
        Some(self.content.variant(variant(step)).at(place.offset).cut(place.length))
    }

    /// Returns tensor `index` in mini-batch `step`, in registered memory.
    pub(crate) fn tensor(&self, index: usize, step: u64) -> Result<Tensor, Failure> {
        let (Some(place), Some(bytes)) = (self.layout.span(index), self.bytes(index, step)) else {
            return Err(Failure::run(format!("there is no variable {index}")));
        };
        Tensor::from_bytes(place.spec, bytes)
            .map_err(|error| Failure::run(format!("variable {index} is no tensor")).because(error))
    }

    /// Returns the result of consuming all tensors, for each variant.
    pub(crate) fn reduced(&self) -> [Reduced; VARIANTS] {
        std::array::from_fn(|variant| {
            let all: Vec<Bytes> =
                self.layout.specs().filter_map(|(index, _)| self.bytes(index, variant as u64)).collect();
            reduce_all(all.iter().map(|bytes| &bytes[..]))
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn tensors_match_the_model_and_the_receivers_expectation() {
        let variables = Variables::new(Model::Gru, Origin::Worker(1), Shard::WHOLE).unwrap();
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
    fn contents_of_models_and_processes_differ() {
        let seed = |model, origin, number| {
            let layout = Layout::new(model, origin, Shard::new(number, 2)).unwrap();
            layout.expected(number, 0).unwrap().1
        };
        let seeds = [
            seed(Model::Gru, Origin::Server, 0),
            seed(Model::Gru, Origin::Server, 1),
            seed(Model::Gru, Origin::Worker(0), 0),
            seed(Model::Gru, Origin::Worker(1), 0),
            seed(Model::Lstm, Origin::Server, 0),
        ];
        assert!((1..seeds.len()).all(|index| !seeds[..index].contains(&seeds[index])));
    }

    #[test]
    fn a_shard_has_its_tensors_under_their_numbers() {
        let model = Model::Gru.variables();
        let mut bytes = 0;
        for number in 0..3 {
            let shard = Variables::new(Model::Gru, Origin::Server, Shard::new(number, 3)).unwrap();
            for (index, variable) in model.iter().enumerate() {
                let tensor = shard.bytes(index, 0);
                assert_eq!(tensor.is_some(), index % 3 == number, "{index}");
                let Some(tensor) = tensor else { continue };
                let (length, seed) = shard.layout().expected(index, 0).unwrap();
                assert_eq!((tensor.len(), length as u64), (length, variable.bytes()));
                assert_eq!(content::check_all(seed, &tensor), None);
                bytes += tensor.len() as u64;
            }
        }
        assert_eq!(bytes, model.iter().map(Variable::bytes).sum::<u64>());
    }
}
