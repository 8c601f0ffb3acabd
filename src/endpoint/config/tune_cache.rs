//! The directory of calibrations on disk.

use std::path::PathBuf;

/// The directory in which calibrations are kept.
///
/// ```
/// use tonic_rdma::{Config, TuneCache};
///
/// let config = Config::default().tune_cache(TuneCache::Off);
/// # drop(config);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum TuneCache {
    /// The directory that the environment names: `RDMA_TUNE_CACHE` (`off`: nowhere), or else
    /// `$XDG_CACHE_HOME/tonic-rdma` or `$HOME/.cache/tonic-rdma`.
    #[default]
    Environment,
    /// This directory, which is created if it does not exist.
    Directory(PathBuf),
    /// Nowhere: every process measures.
    Off,
}

/// The reason why there is no directory for calibrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoDirectory {
    /// The configuration wants no cache.
    #[error("the cache is off")]
    Off,
    /// The environment wants no cache.
    #[error("the cache is off (RDMA_TUNE_CACHE)")]
    OffByVariable,
    /// The variable is set to nothing.
    #[error("RDMA_TUNE_CACHE is empty")]
    Empty,
    /// No variable names a directory.
    #[error("neither XDG_CACHE_HOME nor HOME is set")]
    Unknown,
}

impl TuneCache {
    /// Reads a value of `RDMA_TUNE_CACHE`; `None` if the value is empty.
    pub(super) fn parse(value: &str) -> Option<Self> {
        match value {
            "" => None,
            off if off.eq_ignore_ascii_case("off") => Some(Self::Off),
            path => Some(Self::Directory(path.into())),
        }
    }

    /// Returns the directory.
    pub(crate) fn directory(&self) -> Result<PathBuf, NoDirectory> {
        match self {
            Self::Directory(directory) => Ok(directory.clone()),
            Self::Off => Err(NoDirectory::Off),
            Self::Environment => from_environment(|name| std::env::var_os(name)),
        }
    }
}

fn from_environment(lookup: impl Fn(&str) -> Option<std::ffi::OsString>) -> Result<PathBuf, NoDirectory> {
    if let Some(value) = lookup("RDMA_TUNE_CACHE") {
        return match value.to_str().map(TuneCache::parse) {
            Some(Some(TuneCache::Directory(directory))) => Ok(directory),
            Some(Some(_)) => Err(NoDirectory::OffByVariable),
            Some(None) => Err(NoDirectory::Empty),
            None => Ok(value.into()),
        };
    }
    // The XDG Base Directory Specification says to ignore relative paths.
    let absolute = |name| lookup(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match (absolute("XDG_CACHE_HOME"), absolute("HOME")) {
        (Some(cache), _) => Ok(cache.join("tonic-rdma")),
        (None, Some(home)) => Ok(home.join(".cache").join("tonic-rdma")),
        (None, None) => Err(NoDirectory::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_the_directory() {
        let place = |variables: &[(&str, &str)]| {
            from_environment(|asked| {
                variables.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.into())
            })
        };
        let all = [("RDMA_TUNE_CACHE", "/t"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/h")];
        assert_eq!(place(&all), Ok("/t".into()));
        assert_eq!(place(&all[1..]), Ok("/c/tonic-rdma".into()));
        assert_eq!(place(&all[2..]), Ok("/h/.cache/tonic-rdma".into()));
        assert_eq!(place(&[("XDG_CACHE_HOME", "c"), ("HOME", "/h")]), Ok("/h/.cache/tonic-rdma".into()));
        for none in [&[("RDMA_TUNE_CACHE", "Off"), ("HOME", "/h")][..], &[("HOME", "h")], &[]] {
            place(none).unwrap_err();
        }
    }
}
