//! Parses PTX files and lists their kernels: `cargo run -p ptxsim --example kernels -- target/kernels/*.ptx`.

use ptxsim::Module;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut failed = 0;
    for path in std::env::args().skip(1) {
        match Module::parse(&std::fs::read_to_string(&path)?) {
            Err(error) => {
                println!("{path}: {error}");
                failed += 1;
            }
            Ok(module) => {
                for kernel in module.kernels() {
                    println!(
                        "{path}: {}: {} instructions, {} parameters, {} bytes shared, {} bytes of stack, {:?} threads, {:?} registers",
                        kernel.name(),
                        kernel.num_instructions(),
                        kernel.params().len(),
                        kernel.static_shared_bytes(),
                        kernel.local_bytes(),
                        kernel.max_threads(),
                        kernel.num_registers(),
                    );
                }
            }
        }
    }
    if failed > 0 { Err(format!("{failed} files cannot be run").into()) } else { Ok(()) }
}
