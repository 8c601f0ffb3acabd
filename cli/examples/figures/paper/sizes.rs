//! The sizes of the models' variables: figure 7 of the paper.

#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../../../src/workload/models.rs"]
mod models;

use models::{Model, Variable};

/// Shares of the variables of the paper's six models, from 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    /// Of the number of variables: those above 10 KB, and those above 1 MB.
    pub(crate) above_10_kb: f64,
    pub(crate) above_1_mb: f64,
    /// Of the bytes of all variables: those in variables above 1 MB.
    pub(crate) bytes_above_1_mb: f64,
}

/// Computes the shares from the tables of models that the command uses.
pub(crate) fn shares() -> Shares {
    let measured = Model::ALL.into_iter().filter(|model| *model != Model::Resnet50);
    let sizes: Vec<u64> =
        measured.flat_map(|model| model.variables()).map(|one| Variable::bytes(&one)).collect();
    let above = |least: u64| sizes.iter().copied().filter(move |bytes| *bytes > least);
    let part = |some: f64, all: f64| some / all;
    Shares {
        above_10_kb: part(above(10 << 10).count() as f64, sizes.len() as f64),
        above_1_mb: part(above(1 << 20).count() as f64, sizes.len() as f64),
        bytes_above_1_mb: part(above(1 << 20).sum::<u64>() as f64, sizes.iter().sum::<u64>() as f64),
    }
}

#[cfg(test)]
mod shares_tests {
    use super::*;

    #[test]
    fn most_bytes_are_in_large_variables() {
        let Shares { above_10_kb, above_1_mb, bytes_above_1_mb } = shares();
        assert!((0.0..1.0).contains(&above_10_kb) && above_1_mb < above_10_kb, "{above_10_kb} {above_1_mb}");
        assert!(bytes_above_1_mb > 0.9, "{bytes_above_1_mb}");
    }
}
