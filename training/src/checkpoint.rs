//! Checkpoints: what a training needs to go on from a step. Each is a file of the format safetensors:
//!
//! ```text
//!  FOLDER/step-0000000120.safetensors
//!    NAME             F32    the values of a variable
//!    NAME.velocity    F32    the momentum of each value
//!    losses           F64    the mean loss of the samples of each step before: 120 of them
//!    metadata                what training it is of (`Facts`), and a hash of all tensors
//! ```
//!
//! A file is written under another name, synchronized with the disk and then renamed, so that a file of this
//! name is always whole. One process at a time has the folder, and keeps the newest files only.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use tonic_rdma_commands::{Context as _, Failure};
use xxhash_rust::xxh3::Xxh3;

use crate::array::Error;
use crate::network::Variable;
use crate::options::Options;

/// The number of files that are kept.
const KEPT: usize = 3;

/// The largest number of bytes that is read of a file.
const MOST: u64 = 1 << 30;

/// The name of a file that is being written. A process that dies leaves it, and the next one writes over it.
const UNFINISHED: &str = "unfinished.tmp";

/// What begins the metadata, and in which version.
const FORMAT: (&str, &str) = ("format", "tonic-rdma-training 1");

/// The name of the hash in the metadata, and of the tensor of losses.
const HASH: &str = "hash";
const LOSSES: &str = "losses";

/// Where a training goes on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Checkpoint {
    /// The mean loss of the samples of each step before.
    pub(crate) losses: Vec<f64>,
    /// All variables of the model, in its order.
    pub(crate) variables: Vec<Variable>,
}

/// The folder of a training's checkpoints.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The folder itself, which is locked until this value is dropped.
    folder: File,
    /// Names and values of what has to be the same, so that a training goes on with the same bits.
    facts: Vec<(&'static str, String)>,
    shapes: Vec<(String, Vec<usize>)>,
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Closing the file is not enough: a process that was just forked has it open until its program begins.
        let _ = flock(&self.folder, FlockOperation::Unlock);
    }
}

impl Folder {
    /// Opens the folder that a job names, if it names one. `workers` is the number of processes that compute,
    /// and `samples` the hash of all samples.
    pub(crate) fn open(job: &Options, workers: usize, samples: u64) -> Result<Option<Self>, Failure> {
        let Some(path) = &job.checkpoint else { return Ok(None) };
        let opened = fs::create_dir_all(path).and_then(|()| File::open(path));
        let folder = opened.context(format!("--checkpoint: can't use the folder {}", path.display()))?;
        if let Err(error) = flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            let taken = format!("--checkpoint: another process has the folder {}", path.display());
            return Err(Failure::run(taken).because(io::Error::from(error)));
        }
        let facts = vec![
            ("model", format!("{:?}", job.model).to_lowercase()),
            ("way", job.shape().map_or("allreduce", |_| "parameter-server").to_owned()),
            ("workers", workers.to_string()),
            ("batch", job.batch.to_string()),
            ("seed", job.seed.to_string()),
            ("rate", job.rate().to_string()),
            ("momentum", job.momentum.to_string()),
            ("samples", format!("{samples:016x}")),
        ];
        Ok(Some(Self { path: path.clone(), folder, facts, shapes: job.model.shapes() }))
    }

    /// Returns where a job begins: with the newest checkpoint, or with step 0 if there is none. Without
    /// `resume`, there must be none, so that no training is written over.
    pub(crate) fn begin(&self, resume: bool) -> Result<Option<Checkpoint>, Failure> {
        let Some((step, path)) = self.files()?.pop() else { return Ok(None) };
        if !resume {
            return Err(Failure::usage(format!(
                "--checkpoint: {} is there already; --resume goes on from it, and an empty folder takes another training",
                path.display()
            )));
        }
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(MOST).read_to_end(&mut bytes));
        read.context(format!("can't read {}", path.display()))?;
        let parsed = self.parse(step, &bytes);
        parsed.map(Some).map_err(|reason| Failure::run(format!("{} {reason}", path.display())))
    }

    /// Writes a checkpoint, and removes the oldest of more than [`KEPT`].
    pub(crate) fn save(&self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        let path = self.path.join(name(checkpoint.losses.len() as u64));
        let failed = format!("can't write {}", path.display());
        let bytes = self.file(checkpoint).context(&failed)?;
        let unfinished = self.path.join(UNFINISHED);
        let write = || {
            let mut file = File::create(&unfinished)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&unfinished, &path)?;
            self.folder.sync_all()
        };
        write().context(&failed)?;
        let files = self.files()?;
        for (_, old) in files.iter().take(files.len().saturating_sub(KEPT)) {
            fs::remove_file(old).context(format!("can't remove {}", old.display()))?;
        }
        Ok(())
    }

    /// Returns step and path of each checkpoint, the newest last.
    fn files(&self) -> Result<Vec<(u64, PathBuf)>, Failure> {
        let failed = || format!("--checkpoint: can't read the folder {}", self.path.display());
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.path).context(failed())? {
            let path = entry.context(failed())?.path();
            let step = path.file_name().and_then(|name| name.to_str()).and_then(step);
            files.extend(step.map(|step| (step, path)));
        }
        files.sort();
        Ok(files)
    }

    fn file(&self, checkpoint: &Checkpoint) -> Result<Vec<u8>, Error> {
        let mut tensors = Vec::new();
        for Variable { name, dims, values, velocities } in &checkpoint.variables {
            for (name, numbers) in [(name.clone(), values), (velocity(name), velocities)] {
                let view = TensorView::new(Dtype::F32, dims.clone(), bytemuck::cast_slice(numbers))?;
                tensors.push((name, view));
            }
        }
        let losses = bytemuck::cast_slice(&checkpoint.losses);
        tensors
            .push((LOSSES.to_owned(), TensorView::new(Dtype::F64, vec![checkpoint.losses.len()], losses)?));
        let facts = self.facts.iter().map(|(name, value)| (*name, value.clone()));
        let hash = hash(&mut tensors);
        let metadata = [(FORMAT.0, FORMAT.1.to_owned()), (HASH, hash)].into_iter().chain(facts);
        let metadata = metadata.map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(serialize(tensors, Some(metadata))?)
    }

    /// Returns the checkpoint of a file, or what is wrong with the file.
    fn parse(&self, step: u64, bytes: &[u8]) -> Result<Checkpoint, String> {
        let broken = |reason: &dyn std::fmt::Display| {
            format!(
                "is no whole checkpoint: {reason}; without this file, --resume goes on from the one before"
            )
        };
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| broken(&error))?;
        let file = SafeTensors::deserialize(bytes).map_err(|error| broken(&error))?;
        let of = |name: &str| {
            let all = metadata.metadata().as_ref();
            all.and_then(|all| all.get(name)).map_or("missing", String::as_str)
        };
        let (format, known) = (of(FORMAT.0), FORMAT.1);
        if format != known {
            return Err(format!(
                "is no checkpoint of this program: its format is {format}, and {known:?} is read"
            ));
        }
        let differs = |(name, here): &(&str, String)| {
            let there = of(name);
            (there != here).then(|| format!("{name} {there} there, {here} here"))
        };
        let differing: Vec<String> = self.facts.iter().filter_map(differs).collect();
        if !differing.is_empty() {
            return Err(format!("is of another training: {}", differing.join("; ")));
        }
        if hash(&mut file.tensors()) != of(HASH) {
            return Err(broken(&"its tensors don't have the hash that it names"));
        }
        let tensor = |name: &str, dtype: Dtype, dims: &[usize]| {
            let found = file.tensor(name).map_err(|_| format!("lacks the tensor {name}"))?;
            if found.dtype() == dtype && found.shape() == dims {
                return Ok(found.data());
            }
            let (types, shapes) = ([found.dtype(), dtype], [found.shape(), dims]);
            Err(format!(
                "has the tensor {name} as {:?} {:?}, and {:?} {:?} is read",
                types[0], shapes[0], types[1], shapes[1]
            ))
        };
        let losses = usize::try_from(step).map_err(|error| error.to_string())?;
        let losses = bytemuck::pod_collect_to_vec(tensor(LOSSES, Dtype::F64, &[losses])?);
        let variable = |(name, dims): &(String, Vec<usize>)| {
            let read = |name: &str| tensor(name, Dtype::F32, dims).map(bytemuck::pod_collect_to_vec);
            let (values, velocities) = (read(name)?, read(&velocity(name))?);
            Ok(Variable { name: name.clone(), dims: dims.clone(), values, velocities })
        };
        let variables = self.shapes.iter().map(variable).collect::<Result<_, String>>()?;
        Ok(Checkpoint { losses, variables })
    }
}

/// Returns the step of the newest checkpoint in a folder, or 0.
pub(crate) fn newest(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| step(entry.file_name().to_str()?)).max().unwrap_or(0)
}

/// Returns the name of a checkpoint.
fn name(step: u64) -> String {
    format!("step-{step:010}.safetensors")
}

/// Returns the step of the checkpoint that has this name.
fn step(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
}

fn velocity(variable: &str) -> String {
    format!("{variable}.velocity")
}

/// Sorts tensors by name, and returns a hash of names and bytes.
fn hash(tensors: &mut [(String, TensorView<'_>)]) -> String {
    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut hash = Xxh3::new();
    for (name, tensor) in tensors {
        hash.update(name.as_bytes());
        hash.update(tensor.data());
    }
    format!("{:016x}", hash.digest())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn job(folder: &Path, options: &str) -> Options {
        let line = format!("training --model lstm --checkpoint {} {options}", folder.display());
        Options::try_parse_from(line.split_whitespace()).unwrap()
    }

    fn open(folder: &Path, options: &str) -> Folder {
        Folder::open(&job(folder, options), 2, 7).unwrap().unwrap()
    }

    fn checkpoint(folder: &Folder, steps: usize) -> Checkpoint {
        let variable = |(index, (name, dims)): (usize, &(String, Vec<usize>))| {
            let length: usize = dims.iter().product();
            let values: Vec<f32> =
                (0..length).map(|element| (element + index + steps) as f32 / 7.0).collect();
            let velocities = values.iter().map(|value| -value).collect();
            Variable { name: name.clone(), dims: dims.clone(), values, velocities }
        };
        let variables = folder.shapes.iter().enumerate().map(variable).collect();
        Checkpoint { losses: (0..steps).map(|step| 1.0 / (step + 3) as f64).collect(), variables }
    }

    #[test]
    fn the_folder_is_free_at_once_also_while_a_forked_process_has_it_open() {
        let path = tempfile::tempdir().unwrap();
        let folder = open(path.path(), "");
        let taken = Folder::open(&job(path.path(), ""), 2, 7).unwrap_err().to_string();
        assert!(taken.contains("another process has the folder"), "{taken}");
        let forked = folder.folder.try_clone().unwrap();
        drop(folder);
        drop(open(path.path(), ""));
        drop(forked);
    }

    fn names(folder: &Path) -> Vec<String> {
        let names =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_checkpoint_comes_back_bit_by_bit_and_few_are_kept() {
        let place = tempfile::tempdir().unwrap();
        let folder = open(&place.path().join("new"), "");
        assert_eq!(folder.begin(true).unwrap(), None);
        // What a process left that died while it wrote.
        fs::write(folder.path.join(UNFINISHED), "half").unwrap();
        for steps in [0, 5, 10, 100] {
            let saved = checkpoint(&folder, steps);
            folder.save(&saved).unwrap();
            assert_eq!(folder.begin(true).unwrap(), Some(saved), "{steps}");
        }
        assert_eq!(names(&folder.path), [5, 10, 100].map(name));
        assert_eq!(newest(&folder.path), 100);
        let again = folder.begin(false).unwrap_err();
        assert!(
            again.is_usage() && again.to_string().contains("step-0000000100.safetensors is there already")
        );
    }

    #[test]
    fn one_process_at_a_time_has_the_folder() {
        let place = tempfile::tempdir().unwrap();
        let folder = open(place.path(), "");
        let error = Folder::open(&job(place.path(), ""), 2, 7).unwrap_err().to_string();
        assert!(error.contains("another process has the folder"), "{error}");
        drop(folder);
        open(place.path(), "");
        let file = place.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Folder::open(&job(&file, ""), 2, 7).unwrap_err().to_string();
        assert!(error.contains("can't use the folder") && error.contains("file"), "{error}");
    }

    #[test]
    fn a_checkpoint_that_can_not_be_used_is_named_with_its_reason() {
        let place = tempfile::tempdir().unwrap();
        let folder = open(place.path(), "");
        folder.save(&checkpoint(&folder, 4)).unwrap();
        let path = place.path().join(name(4));
        let whole = fs::read(&path).unwrap();
        let check = |folder: &Folder, bytes: &[u8], reason: &str| {
            fs::write(&path, bytes).unwrap();
            let error = folder.begin(true).unwrap_err().with_causes();
            assert!(error.starts_with(&format!("{} ", path.display())), "{error}");
            assert!(error.contains(reason), "{reason}: {error}");
        };
        // Every length, and a bit that is wrong in tensors and in metadata.
        for length in (0..whole.len()).step_by(whole.len() / 23) {
            check(&folder, &whole[..length], "is no whole checkpoint: ");
        }
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        check(&folder, &flipped, "don't have the hash");
        // A file of another program, one of another step, and one that lacks a tensor.
        let view = TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap();
        check(
            &folder,
            &serialize([("weight", view)], None).unwrap(),
            "is no checkpoint of this program: its format is missing",
        );
        check(
            &folder,
            &folder.file(&checkpoint(&folder, 5)).unwrap(),
            "losses as F64 [5], and F64 [4] is read",
        );
        let mut less = checkpoint(&folder, 4);
        less.variables.pop();
        check(&folder, &folder.file(&less).unwrap(), "lacks the tensor output.bias");
        let mut other = checkpoint(&folder, 4);
        other.variables[0].dims = vec![other.variables[0].values.len()];
        check(
            &folder,
            &folder.file(&other).unwrap(),
            "has the tensor embedding as F32 [776], and F32 [97, 8] is read",
        );
        drop(folder);
        for (options, reason) in [
            ("--batch 32", "is of another training: batch 128 there, 32 here"),
            ("--seed 2 --rate 0.1", "seed 1 there, 2 here; rate 0.5 there, 0.1 here"),
            ("--momentum 0", "momentum 0.9 there, 0 here"),
            ("--sync parameter-server", "way allreduce there, parameter-server here"),
        ] {
            check(&open(place.path(), options), &whole, reason);
        }
        let of = |workers, samples| Folder::open(&job(place.path(), ""), workers, samples).unwrap().unwrap();
        check(&of(3, 7), &whole, "workers 2 there, 3 here");
        check(&of(2, 8), &whole, "samples 0000000000000007 there, 0000000000000008 here");
        // The number of servers and how tensors cross change no bit.
        fs::write(&path, &whole).unwrap();
        assert_eq!(of(2, 7).begin(true).unwrap().unwrap().losses.len(), 4);
    }
}
