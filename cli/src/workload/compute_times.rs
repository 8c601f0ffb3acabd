//! The time that a worker computes for a mini-batch, from table 2 of Xue et al., "Fast Distributed Deep Learning over
//! RDMA" (EuroSys 2019), measured there on a Tesla P100.
//!
//! The table gives the time of one sample. For larger batches §5.2 gives words and no numbers: AlexNet, VGGNet-16 and
//! FCN-5 take the same time for small and large mini-batches, because the accelerator has threads to spare; the time of
//! the other three grows when the batch is larger than 32. So this module takes the time of one sample for every batch
//! up to 32, and for these three models a time in proportion to the batch above 32.

use std::time::Duration;

use super::Model;

/// The largest batch that takes no longer than one sample in models whose time grows.
const ONE_SAMPLE_UP_TO: u32 = 32;

impl Model {
    /// Returns the computing time of a mini-batch of `batch` samples, or `None` for a model that the table does not
    /// have.
    pub(crate) fn compute_time(self, batch: u32) -> Option<Duration> {
        let sample = self.sample_time()?;
        Some(match self {
            Self::InceptionV3 | Self::Lstm | Self::Gru if batch > ONE_SAMPLE_UP_TO => {
                sample * batch / ONE_SAMPLE_UP_TO
            }
            _ => sample,
        })
    }

    /// Returns the computing time of one sample in table 2.
    const fn sample_time(self) -> Option<Duration> {
        let micros = match self {
            Self::Alexnet => 7_610,
            Self::InceptionV3 => 68_320,
            Self::Vgg16 => 30_920,
            Self::Lstm => 33_330,
            Self::Gru => 30_440,
            Self::Fcn5 => 4_880,
            Self::Resnet50 => return None,
        };
        Some(Duration::from_micros(micros))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_that_of_one_sample_up_to_a_batch_of_32() {
        for model in Model::ALL {
            let one = model.compute_time(1);
            assert_eq!(one.is_none(), model == Model::Resnet50, "{model:?}");
            for batch in [2, 8, 32] {
                assert_eq!(model.compute_time(batch), one, "{model:?}");
            }
        }
        assert_eq!(Model::Lstm.compute_time(1), Some(Duration::from_micros(33_330)));
    }

    #[test]
    fn above_32_only_three_models_take_longer() {
        for (model, times) in [
            (Model::Alexnet, 1),
            (Model::Vgg16, 1),
            (Model::Fcn5, 1),
            (Model::InceptionV3, 2),
            (Model::Lstm, 2),
            (Model::Gru, 2),
        ] {
            let one = model.compute_time(1);
            assert_eq!(model.compute_time(64), one.map(|one| one * times), "{model:?}");
        }
        assert_eq!(Model::Gru.compute_time(48), Some(Duration::from_micros(45_660)));
    }
}
