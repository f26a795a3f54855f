//! Embeds the compiled kernels when the feature `kernels` is on: of each source file one PTX and any number of cubins.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// The source files in kernels/, without `.cu`.
const MODULES: [&str; 6] = ["pointwise", "blocks", "rope_and_cache", "attention", "int4_matmul", "sampling"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let images = if env::var("CARGO_FEATURE_KERNELS").is_ok() { images() } else { Ok(Vec::new()) };
    let list = match images {
        Ok(images) => format!("&[\n{}]\n", images.concat()),
        Err(reason) => format!("compile_error!({reason:?})\n"),
    };
    fs::write(out.join("images.rs"), list).expect("the list of kernels can be written");
}

/// One line of the list for each image, or why there is none.
fn images() -> Result<Vec<String>, String> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let folder = root.join("../../target/kernels");
    println!("cargo::rerun-if-changed={}", folder.display());
    let missing = |what: &str| {
        format!(
            "the feature `kernels` needs the compiled kernels, and {what} is missing; make them with `python kernels/build.py`"
        )
    };
    let mut names: Vec<PathBuf> = fs::read_dir(&folder)
        .map_err(|_| missing("the folder target/kernels"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .collect();
    names.sort();
    let mut lines = Vec::new();
    for module in MODULES {
        let ptx = folder.join(format!("{module}.ptx"));
        if !ptx.is_file() {
            return Err(missing(&format!("target/kernels/{module}.ptx")));
        }
        lines.push(line(module, None, &ptx));
        lines.extend(names.iter().filter_map(|path| {
            let name = path.file_name()?.to_str()?;
            let architecture = name.strip_prefix(module)?.strip_prefix('.')?.strip_suffix(".cubin")?;
            Some(line(module, Some(architecture), path))
        }));
    }
    Ok(lines)
}

fn line(module: &str, architecture: Option<&str>, path: &Path) -> String {
    let path = fs::canonicalize(path).expect("the image exists");
    println!("cargo::rerun-if-changed={}", path.display());
    format!("Image {{ module: {module:?}, architecture: {architecture:?}, bytes: include_bytes!({path:?}) }},\n")
}
